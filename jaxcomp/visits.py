"""Watches which modules of a model are called, and on what."""

import math
import re
import types
from typing import Any

import jax
from flax import nnx

from jaxcomp.nn.norm_act import NormAct
from jaxcomp.ops import Activation, value

_MARK = "module:"
_OF_RESULT = ("norm_act", "max_pool")  # kinds


def watched(model: nnx.Module, called: dict[str, int]) -> nnx.Module:
    """A copy of a model that notes its modules' calls, and marks what they compute.

    Args:
        model: Any model.
        called: Takes, by path, the elements of what each called module stores: of its first
            argument, or of its result if it is of a kind that stores that, and of what a
            `NormAct` has a code for besides: a residual's norm, and the array before a pool.
    """
    model = nnx.clone(model)
    for path, module in list(nnx.iter_modules(model)):
        if callable(module):
            name = "/".join(map(str, path))
            module.__class__ = _watched(type(module), name, called)
    return model


def _watched(kind: type[nnx.Module], path: str, called: dict[str, int]) -> type[nnx.Module]:
    def call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(_MARK + path.encode().hex()):
            called.setdefault(path, 0)
            result = kind.__call__(self, *args, **kwargs)
        given = [*args, *kwargs.values()]
        stored = [result] if getattr(self, "kind", "") in _OF_RESULT else given[:1]
        if isinstance(self, NormAct):
            stored += [] if self.residual_norm is None else [result]
            stored += [] if self.pool is None else given[:1]
        leaves = jax.tree.leaves(stored, is_leaf=lambda x: isinstance(x, Activation))
        called[path] += sum(math.prod(value(leaf).shape) for leaf in leaves)
        return result

    return types.new_class(
        kind.__name__, (kind,), exec_body=lambda body: body.update(__call__=call)
    )


def modules_of(scope: str) -> list[str]:
    """The paths of the modules in whose calls a value was made, from outside in."""
    return [bytes.fromhex(path).decode() for path in re.findall(rf"{_MARK}([0-9a-f]*)", scope)]
