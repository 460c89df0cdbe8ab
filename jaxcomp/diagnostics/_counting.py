"""Counts the values of recognized batch norms that their codes clip."""

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jaxcomp._core.modules import set_class, stock_class
from jaxcomp.codecs import SignAware
from jaxcomp.codecs._offload import inner_codec
from jaxcomp.ops import CodedArray
from jaxcomp.ops._norm_act import Statistics, share_clipped
from jaxcomp.ops._norm_act_vjp import Input
from jaxcomp.policies._policy import JaxPolicy, Policy
from jaxcomp.transform._checkpoint import Checkpointed
from jaxcomp.transform._choice.context import Context
from jaxcomp.transform._compress import (
    compressed_methods,
)
from jaxcomp.transform._program.builder import flat
from jaxcomp.transform._program.origins import module_path
from jaxcomp.transform._program.program import Program, avals
from jaxcomp.transform._recognition.recognize import recognize
from jaxcomp.transform._recognition.substitute import with_units
from jaxcomp.transform._recognition.unit import NormAct

# Called with a norm's path, its bits and the fraction of its values that are clipped.
Record = Callable[[str, int, Array], None]


class Counting(Checkpointed):
    """A function that counts what the codes of its batch norms would clip, and saves nothing.

    Batch norms in the bodies of loops are not counted.
    """

    def __init__(
        self, fn: Callable[..., Any], policy: Policy | JaxPolicy, *, record: Record, prefix: str
    ) -> None:
        super().__init__(fn, policy, (), (), {}, None)
        self._record = record
        self._prefix = prefix  # of the norms' paths

    def _run(self, program: Program, coded: list[int], arguments: Sequence[Any]) -> list[Any]:
        program = flat(program)
        kinds = avals(program.arguments)
        active = [i for i, kind in enumerate(kinds) if jnp.issubdtype(kind.dtype, jnp.inexact)]
        units = recognize(program, active, coded, Context(self._policy))
        counting = with_units(program, units, self._count)
        return counting(*arguments, jnp.uint32(0))

    def _count(
        self,
        unit: NormAct,
        inputs: tuple[Input, ...],
        made: CodedArray,
        means: Statistics,
        variances: Statistics,
    ) -> None:
        codec = inner_codec(made.codec)
        assert isinstance(codec, SignAware)
        norms, (first, *_) = [one.norm for one in unit.norms], inputs
        arrays = [one.x for one in inputs]
        share = share_clipped(norms, arrays, first.scale, first.bias, means, variances, made)
        path = self._prefix + module_path(unit.origin)
        jax.debug.callback(functools.partial(self._record, path, codec.bits), share)


def count_clipped(model: nnx.Module, record: Record) -> None:
    """Makes the compressed modules of a model count what their batch norms clip, and save nothing.

    Args:
        model: The model, which is changed.
        record: Called in each call of the model with the path of a batch norm, its bits and the
            fraction of its values that are clipped.
    """
    for names, module in list(nnx.iter_modules(model)):
        policy = getattr(type(module), "policy_of_values", None)
        if policy is None:
            continue
        prefix = "".join(f"{name}/" for name in names)
        count = functools.partial(Counting, record=record, prefix=prefix)
        set_class(module, _counting_class(stock_class(module), policy, count))


def _counting_class(kind: type[nnx.Module], *arguments: Any) -> type[nnx.Module]:
    """Returns a class of its own: what is compiled for it is not what is compiled for training."""
    methods = compressed_methods(kind, *arguments)
    return types.new_class(kind.__name__, (kind,), {}, lambda body: body.update(methods))
