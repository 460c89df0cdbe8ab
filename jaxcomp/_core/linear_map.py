"""Linear functions with a transpose of their own, which JAX does not derive.

Forward mode evaluates the function. Reverse mode evaluates its transpose, as that of a
`jax.custom_vjp` function.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxcomp._core.shard_map import filled

ByPosition = dict[int, Any]

_linear_map = Primitive("linear_map")
_linear_map.multiple_results = True


def linear_map(
    apply: Callable[[Any, ByPosition], ByPosition],
    transpose: Callable[[Any, ByPosition], ByPosition],
    residual: Any,
    tangents: ByPosition,
    results: ByPosition,
) -> ByPosition:
    """Calls a linear function of which the transpose is given.

    Args:
        apply: From the residual and tangents to the tangents of results.
        transpose: From the residual and the cotangents of results, those that are not zero, to
            the cotangents of arguments. What it leaves out is zero.
        residual: Any pytree of arrays. It is all that waits for the transpose.
        tangents: The tangents.
        results: Arrays of the shapes and dtypes of the results.
    """
    leaves, tree = jax.tree.flatten(residual)
    arguments, outs = [*tangents], [*results]  # no closure holds arrays

    def apply_flat(leaves: Sequence[Any], moves: Sequence[Any]) -> list[Any]:
        given = dict(zip(arguments, moves, strict=True))
        made = apply(jax.tree.unflatten(tree, leaves), given)
        return [made[i] for i in outs]

    def transpose_flat(leaves: Sequence[Any], arrived: ByPosition) -> list[Any]:
        cotangents = {i: arrived[k] for k, i in enumerate(outs) if k in arrived}
        made = transpose(jax.tree.unflatten(tree, leaves), cotangents)
        return [made.get(i) for i in arguments]

    made = _linear_map.bind(
        *leaves,
        *tangents.values(),
        apply=apply_flat,
        transpose=transpose_flat,
        residuals=len(leaves),
        kinds=tuple(map(jax.typeof, results.values())),
    )
    return dict(zip(results, made, strict=True))


@_linear_map.def_impl
def _evaluate(*operands: Any, apply: Any, transpose: Any, residuals: int, kinds: Any) -> Any:
    return apply(operands[:residuals], operands[residuals:])


@_linear_map.def_abstract_eval
def _(*operands: Any, apply: Any, transpose: Any, residuals: int, kinds: Any) -> Any:
    return kinds


def _derivative(
    operands: Any, moves: Any, *, apply: Any, transpose: Any, residuals: int, kinds: Any
) -> Any:
    """Returns the derivative by the tangents, which is the map itself, and by the residual."""
    given, tangents = operands[:residuals], operands[residuals:]
    call = functools.partial(
        _linear_map.bind, apply=apply, transpose=transpose, residuals=residuals, kinds=kinds
    )
    parts = []
    if not all(isinstance(move, ad.Zero) for move in moves[residuals:]):
        parts.append(call(*given, *map(ad.instantiate_zeros, moves[residuals:])))
    moved = [
        i
        for i, (value, move) in enumerate(zip(given, moves, strict=False))
        if not isinstance(move, ad.Zero) and jnp.issubdtype(value.dtype, jnp.inexact)
    ]
    if moved:

        def at(*chosen: Any) -> Any:
            full = dict(enumerate(given)) | dict(zip(moved, chosen, strict=True))
            return apply(list(full.values()), tangents)

        chosen, directions = [given[i] for i in moved], [moves[i] for i in moved]
        parts.append(jax.jvp(jax.checkpoint(at), chosen, directions)[1])
    return call(*operands), [functools.reduce(jnp.add, terms) for terms in zip(*parts, strict=True)]


def _transpose(
    cotangents: Any, *operands: Any, apply: Any, transpose: Any, residuals: int, kinds: Any
) -> Any:
    arrived = {i: c for i, c in enumerate(cotangents) if not isinstance(c, ad.Zero)}
    made = transpose(operands[:residuals], arrived)
    pairs = zip(operands[residuals:], made, strict=True)
    return [
        *[None] * residuals,
        *(found if ad.is_undefined_primal(tangent) else None for tangent, found in pairs),
    ]


def _batch(
    axis: Any, operands: Any, axes: Any, *, apply: Any, transpose: Any, residuals: int, kinds: Any
) -> Any:
    # What JAX has in place of a name is an `object()`. A name may be read in the function.
    if type(axis.name) is object and all(at is None for at in axes):
        call = functools.partial(_linear_map.bind, apply=apply, transpose=transpose)
        return call(*operands, residuals=residuals, kinds=kinds), [None] * len(kinds)
    options = {"axis_name": axis.name, "axis_size": axis.size, "spmd_axis_name": axis.spmd_name}
    tangents = [
        batching.bdim_at_front(value, at, axis.size)
        for value, at in zip(operands[residuals:], axes[residuals:], strict=True)
    ]

    def mapped(function: Any) -> Any:
        return jax.vmap(function, (list(axes[:residuals]), 0), **options)

    def zeros(_: Any) -> list[Any]:
        return [filled(kind, 0.0) for kind in kinds]

    made = _linear_map.bind(
        *operands[:residuals],
        *tangents,
        apply=lambda leaves, tangents: mapped(apply)(list(leaves), tangents),
        transpose=lambda leaves, cotangents: mapped(transpose)(list(leaves), cotangents),
        residuals=residuals,
        kinds=tuple(jax.make_jaxpr(jax.vmap(zeros))(jnp.arange(axis.size)).out_avals),
    )
    return made, [0] * len(made)


ad.primitive_jvps[_linear_map] = _derivative
ad.primitive_transposes[_linear_map] = _transpose
batching.fancy_primitive_batchers[_linear_map] = _batch
mlir.register_lowering(_linear_map, mlir.lower_fun(_evaluate))
