"""`jax.checkpoint` around each block of a model."""

import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx


def remat_blocks(model: nnx.Module, policy: Callable[..., Any] | None = None) -> nnx.Module:
    """Makes each block of a model be recomputed in the backward pass.

    A block is a module in a list of modules (`nnx.List`, `nnx.Sequential`, a tuple); of lists
    inside lists the outermost counts. Parameters, state and paths stay as they are.

    Args:
        model: The model, which is changed.
        policy: What of a block is kept instead, as `jax.checkpoint` takes it; None is nothing.

    Returns:
        The same model.

    Raises:
        ValueError: If the model has no list of modules.

    Example:
        >>> model = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
        >>> remat_blocks(model) is model
        True
    """
    in_lists = [(path, m) for path, m in nnx.iter_modules(model) if any(map(_is_index, path))]
    paths = {path for path, _ in in_lists}
    blocks = {
        id(m): m
        for path, m in in_lists
        if _is_index(path[-1]) and not any(path[:i] in paths for i in range(1, len(path)))
    }
    if not blocks:
        raise ValueError(
            f"model={type(model).__name__}: expected one with its blocks in a list (nnx.List), "
            "for each to be recomputed; it has none"
        )
    for block in blocks.values():
        block.__class__ = _recomputed(type(block), policy)
    return model


def _is_index(key: Any) -> bool:
    return isinstance(key, int)


def _has_arrays(value: Any) -> bool:
    return any(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(value))


def _recomputed(kind: type[nnx.Module], policy: Callable[..., Any] | None) -> type[nnx.Module]:
    """The class with its call under `jax.checkpoint`; an argument without arrays is a constant."""

    def call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        arrays = [a for a in (*args, *kwargs.values()) if _has_arrays(a)]

        def run(block: nnx.Module, *arrays: Any) -> Any:
            rest = iter(arrays)
            given = [next(rest) if _has_arrays(a) else a for a in args]
            named = {key: next(rest) if _has_arrays(a) else a for key, a in kwargs.items()}
            return kind.__call__(block, *given, **named)

        return nnx.remat(run, policy=policy)(self, *arrays)

    return types.new_class(
        kind.__name__, (kind,), exec_body=lambda body: body.update(__call__=call)
    )
