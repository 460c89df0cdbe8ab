"""`jax.checkpoint` around each block of a model, whose input may be saved encoded."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxcomp._core import barriers
from jaxcomp._core.modules import derived, set_class, split_model
from jaxcomp._core.shard_map import match_varying
from jaxcomp.codecs import Codec, Encoded
from jaxcomp.transform._execution.waiting import evaluate_after
from jaxcomp.transform._pieces.limits import current_limits
from jaxcomp.transform._program.program import Program


def remat_blocks(
    model: nnx.Module,
    policy: Callable[..., Any] | None = None,
    codec: Codec | None = None,
    part: slice = slice(None),
) -> nnx.Module:
    """Recomputes each block of a model in the backward pass, or a part of the blocks.

    A block is a module with a call of its own in a list of modules (`nnx.List`, `nnx.Sequential`,
    a tuple), in lists inside of lists, too. Of blocks inside of blocks the outermost count.
    Parameters, state and paths stay as they are.

    With a codec the arguments of a block are saved encoded, and the block is recomputed and
    differentiated at the decoded arguments. The gradient is biased even if the codec is not, since
    a block is not linear.

    Args:
        model: The model, which is changed.
        policy: What of a block is kept, as `jax.checkpoint` takes it; None keeps nothing.
        codec: Encodes the arguments of a block; None saves them as they are. Not with a policy.
        part: Which blocks, in the order of their paths.

    Returns:
        The same model.

    Raises:
        ValueError: If the model has no blocks, or fewer than `part` names, or there are both a
            policy and a codec; in the call, if the codec cannot store an argument.

    Example:
        >>> model = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
        >>> remat_blocks(model) is model
        True
    """
    if policy is not None and codec is not None:
        raise ValueError(f"codec={codec}: expected None with a policy")
    blocks = blocks_of(model)
    if not blocks:
        called = [path for path, module in nnx.iter_modules(model) if path and callable(module)]
        others = ", ".join("/".join(map(str, path)) for path in _outermost(called)) or "none"
        raise ValueError(
            f"model={type(model).__name__}: expected one with its blocks in a list (nnx.List, "
            f"nnx.Sequential or a tuple), for each to be recomputed; its modules are {others}. Put "
            "the blocks in a list, or nnx.remat around what calls them"
        )
    if part.stop is not None and part.stop > len(blocks):
        raise ValueError(
            f"model={type(model).__name__}: expected {part.stop} blocks or more, not {len(blocks)}"
        )
    for block in list(blocks.values())[part]:
        set_class(block, derived(type(block), _recomputed, policy, codec))
    return model


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


def _recomputed(
    kind: type[nnx.Module], policy: Callable[..., Any] | None, codec: Codec | None
) -> dict[str, Any]:
    """Returns a call under `jax.checkpoint`; an argument without arrays is a constant."""

    def call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        arrays = [a for a in (*args, *kwargs.values()) if _has_arrays(a)]

        def run(block: nnx.Module, *arrays: Any) -> Any:
            rest = iter(arrays)
            given = [next(rest) if _has_arrays(a) else a for a in args]
            named = {key: next(rest) if _has_arrays(a) else a for key, a in kwargs.items()}
            return kind.__call__(block, *given, **named)

        if codec is not None:
            return _from_codes(run, codec, self, arrays)
        return nnx.remat(run, policy=policy)(self, *arrays)

    return {"__call__": call, "encodes": codec is not None}


def _from_codes(
    run: Callable[..., Any], codec: Codec, block: nnx.Module, arrays: Sequence[Any]
) -> Any:
    """Calls a block and saves the codes of its arguments."""
    graphdef, params, rest = split_model(block)

    def pure(params: Any, rest: Any, arrays: Any) -> tuple[Any, Any]:
        block = nnx.merge(graphdef, params, rest, copy=True)
        out = run(block, *arrays)
        _, _, *state = nnx.split(block, nnx.Param, nnx.BatchStat, ...)
        return out, state

    def forward(params: Any, rest: Any, arrays: Any) -> tuple[Any, Any]:
        codes = jax.tree.map(lambda a: codec.encode(a) if _is_float(a) else a, arrays)
        arrays, codes = barriers.save_residual(arrays, codes, codec)
        return pure(params, rest, arrays), (params, rest, codes)

    def backward(saved: Any, cotangents: Any) -> tuple[Any, ...]:
        params, rest, codes = saved
        # Parameters pass, too, or XLA keeps the casts of the forward pass for this one.
        out_cotangent, (_, others) = cotangents
        cotangent = out_cotangent, _floats(others)
        (params, rest, codes), cotangent = barriers.barrier_together(
            (params, rest, codes), cotangent
        )
        arrays = jax.tree.map(
            lambda code: codec.decode(code) if isinstance(code, Encoded) else code,
            codes,
            is_leaf=lambda leaf: isinstance(leaf, Encoded),
        )

        def pulled(params: Any, arrays: Any, cotangent: Any) -> Any:
            def differentiable(params: Any, arrays: Any) -> Any:
                out, (_, others) = pure(params, rest, arrays)
                return out, _floats(others)

            _, pull = jax.vjp(differentiable, params, arrays)
            return pull(cotangent)

        given = params, arrays, cotangent
        traced, shape = jax.make_jaxpr(pulled, return_shape=True)(*given)
        largest = max(jax.tree.leaves(cotangent[0]), key=lambda leaf: leaf.size)
        leaves = evaluate_after(
            Program.of(traced), largest, jax.tree.leaves(given), current_limits()
        )
        dparams, darrays = jax.tree.unflatten(jax.tree.structure(shape), leaves)
        dparams, darrays = barriers.barrier_together(dparams, darrays)
        return dparams, None, darrays

    op = jax.custom_vjp(pure)
    op.defvjp(forward, backward)
    params, given = match_varying((params, list(arrays)))
    out, changed = op(params, rest, given)
    nnx.update(block, *changed)
    return out


def _floats(state: Any) -> list[Any]:
    """Returns the floating-point arrays of a state, or their cotangents."""
    return [leaf for leaf in jax.tree.leaves(state) if _is_float(leaf)]


def _is_float(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jnp.floating)
