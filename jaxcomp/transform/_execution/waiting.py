"""Constant arrays of a backward pass, made no earlier than a cotangent is there.

XLA makes constant arrays, such as the zeros that the sums of a loop begin with, early, and those of
all layers in one kernel, so those of all layers wait for the first.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxcomp._core import barriers
from jaxcomp._core.shard_map import barrier_by_type
from jaxcomp.memory._tracing import CHECKPOINT_PRIMITIVES
from jaxcomp.transform._pieces.limits import Limits
from jaxcomp.transform._pieces.pieces import in_pieces
from jaxcomp.transform._program.builder import flat
from jaxcomp.transform._program.program import Program, apply, evaluate, scope_of
from jaxcomp.transform._program.types import Equation, is_variable

_LARGE = 2**14  # elements


def evaluate_after(
    program: Program,
    cotangent: Array,
    arguments: Sequence[Array],
    limits: Limits,
) -> list[Any]:
    """Evaluates a backward program, whose large constant arrays wait for a cotangent.

    Args:
        program: The program.
        cotangent: Axis 0 is the batch; arrays of as many samples wait.
        arguments: Values of its arguments.
        limits: Sizes of pieces of inner `jax.checkpoint`s.
    """
    step = functools.partial(apply_after, cotangent, limits=limits)
    return evaluate(flat(program), arguments, step)


def apply_after(
    cotangent: Array | None, equation: Equation, values: list[Array], limits: Limits
) -> list[Any]:
    """Does what `apply` does, but large constant arrays wait for a cotangent.

    Also those of an inner `jax.checkpoint`, which is evaluated in pieces of these sizes.
    """
    if cotangent is None or not cotangent.ndim:
        return apply(equation, values)
    if equation.primitive.name in CHECKPOINT_PRIMITIVES:
        if equation.params["prevent_cse"]:
            values = barrier_by_type(values)
        program = flat(Program.of(equation.params["jaxpr"]))
        inside = functools.partial(evaluate_after, limits=dataclasses.replace(limits, outside=0))
        with scope_of(equation):
            return in_pieces(program, inside, limits)(cotangent, values)
    if _waits(equation, cotangent):
        (value,), (out,) = values, equation.outvars
        kind: Any = out.aval
        filled = jnp.full(kind.shape, value, kind.dtype)
        return [barriers.decode_after(cotangent, (), lambda _: filled)]
    return apply(equation, values)


def _waits(equation: Equation, cotangent: Array) -> bool:
    if equation.primitive.name != "broadcast_in_dim" or any(map(is_variable, equation.invars)):
        return False
    kind: Any = equation.outvars[0].aval
    large = kind.size >= _LARGE and cotangent.size > 0
    same_batch = large and kind.shape[0] == cotangent.shape[0]
    real = all(jnp.issubdtype(a.dtype, jnp.floating) for a in (kind, cotangent))
    return same_batch and real and not jax.typeof(cotangent).manual_axis_type.varying
