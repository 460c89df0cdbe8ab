"""Recomputed blocks of a model, whose inputs may be saved encoded."""

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxcomp._core.modules import derived, set_class
from jaxcomp.codecs import Codec
from jaxcomp.policies.recipes import boundary
from jaxcomp.transform._checkpoint import checkpoint
from jaxcomp.transform._compress import compressed_methods

# A block's parameters, its other state and its arguments are three arguments.
_WITH_CODED_ARGUMENTS = functools.partial(checkpoint, coded_argnums=2)


def remat_blocks(
    model: nnx.Module, policy: Callable[..., Any] | None = None, part: slice = slice(None)
) -> nnx.Module:
    """Recomputes each block of a model in the backward pass, or a part of the blocks.

    A block is a module with a call of its own in a list of modules (`nnx.List`, `nnx.Sequential`,
    a tuple), in lists inside of lists, too. Of blocks inside of blocks the outermost count.
    Parameters, state and paths stay as they are.

    Args:
        model: The model, which is changed.
        policy: What of a block is kept, as `jax.checkpoint` takes it; None keeps nothing.
        part: Which blocks, in the order of their paths.

    Returns:
        The same model.

    Raises:
        ValueError: If the model has no blocks, or fewer than `part` names.

    Example:
        >>> model = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
        >>> remat_blocks(model) is model
        True
    """
    blocks = _expect_blocks(model)
    if part.stop is not None and part.stop > len(blocks):
        raise ValueError(
            f"model={type(model).__name__}: expected {part.stop} blocks or more, not {len(blocks)}"
        )
    for block in blocks[part]:
        set_class(block, derived(type(block), _recomputed, policy))
    return model


def encode_boundaries(model: nnx.Module, codec: Codec) -> nnx.Module:
    """Saves the inputs of each block of a model by a codec, and recomputes the block from them.

    The gradient is biased even if the codec is not, since a block is not linear
    (`recipes.boundary`).

    Args:
        model: The model, which is changed.
        codec: Encodes the floating-point arrays among the arguments of a block.

    Returns:
        The same model.

    Raises:
        ValueError: If the model has no blocks.
    """
    policy = boundary(codec)
    optional = [dataclasses.replace(rule, required=False) for rule in policy.rules]
    policy = dataclasses.replace(policy, rules=tuple(optional))  # a block may take integers alone
    for block in _expect_blocks(model):
        kind = derived(type(block), compressed_methods, policy, _WITH_CODED_ARGUMENTS)
        set_class(block, kind)
    return model


def _expect_blocks(model: nnx.Module) -> list[nnx.Module]:
    """Returns the blocks of a model; a ValueError if there are none."""
    blocks = blocks_of(model)
    if not blocks:
        called = [path for path, module in nnx.iter_modules(model) if path and callable(module)]
        others = ", ".join("/".join(map(str, path)) for path in _outermost(called)) or "none"
        raise ValueError(
            f"model={type(model).__name__}: expected one with its blocks in a list (nnx.List, "
            f"nnx.Sequential or a tuple), for each to be recomputed; its modules are {others}. Put "
            "the blocks in a list, or nnx.remat around what calls them"
        )
    return list(blocks.values())


def blocks_of(model: nnx.Module) -> dict[str, nnx.Module]:
    """Returns the blocks of a model by their paths, in the order of these."""
    called = {path: m for path, m in nnx.iter_modules(model) if path and callable(m)}
    in_lists = [path for path in called if any(isinstance(key, int) for key in path)]
    return {"/".join(map(str, path)): called[path] for path in _outermost(in_lists)}


def _outermost(paths: Collection[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Returns the paths that are not inside of another one."""
    known = set(paths)
    return [p for p in paths if not any(p[:i] in known for i in range(1, len(p)))]


def _has_arrays(value: Any) -> bool:
    return any(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(value))


def _recomputed(kind: type[nnx.Module], policy: Callable[..., Any] | None) -> dict[str, Any]:
    """Returns a call under `jax.checkpoint`; an argument without arrays is a constant."""

    def call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        arrays = [a for a in (*args, *kwargs.values()) if _has_arrays(a)]

        def run(block: nnx.Module, *arrays: Any) -> Any:
            rest = iter(arrays)
            given = [next(rest) if _has_arrays(a) else a for a in args]
            named = {key: next(rest) if _has_arrays(a) else a for key, a in kwargs.items()}
            return kind.__call__(block, *given, **named)

        return nnx.remat(run, policy=policy)(self, *arrays)

    return {"__call__": call}
