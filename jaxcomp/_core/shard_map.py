"""Types of arrays inside of `jax.shard_map`: the mesh axes over which their values vary.

Types carry these axes if `jax.shard_map` checks them (`check_vma=True`, the default). Outside of
`jax.shard_map`, and without the check, no array varies by its type.
"""

from collections.abc import Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

T = TypeVar("T")


def match_varying(operands: T) -> T:
    """Makes arrays vary over every mesh axis over which one of them varies.

    A custom rule must return gradients with the types of its arguments. In data parallelism the
    batch varies over devices, and so does every gradient in the backward pass, but a parameter does
    not. This function makes the parameter vary, and JAX sums its gradient over the devices.

    Args:
        operands: Any pytree of arrays.

    Returns:
        The same arrays with matching types.

    Example:
        >>> import jax.numpy as jnp
        >>> match_varying((jnp.ones(2), None))
        (Array([1., 1.], dtype=float32), None)
    """
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves(operands)))
    return jax.tree.map(lambda leaf: vary(leaf, axes), operands)


def vary(array: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Makes an array vary over some mesh axes, besides those over which it varies."""
    missing = tuple(sorted({*axes} - varying_axes(array)))
    return lax.pcast(array, missing, to="varying") if missing else array


def vary_like(array: jax.Array, others: Iterable[jax.Array]) -> jax.Array:
    """Makes an array vary over every mesh axis over which one of other arrays varies."""
    return vary(array, frozenset().union(*map(varying_axes, others)))


def barrier_by_type(values: T) -> T:
    """Groups arrays by the mesh axes over which they vary, and places a barrier around each group.

    After a single barrier, each array would vary over the axes of all.

    Args:
        values: Any pytree of arrays.

    Returns:
        The same arrays with the same types.

    Example:
        >>> import jax.numpy as jnp
        >>> barrier_by_type([jnp.ones(2)])
        [Array([1., 1.], dtype=float32)]
    """
    leaves, tree = jax.tree.flatten(values)
    axes = list(map(varying_axes, leaves))
    for of_type in dict.fromkeys(axes):
        places = [i for i, own in enumerate(axes) if own == of_type]
        held = lax.optimization_barrier([leaves[i] for i in places])
        for i, leaf in zip(places, held, strict=True):
            leaves[i] = leaf
    return jax.tree.unflatten(tree, leaves)


def seed_like(seed: jax.Array, array: jax.Array) -> jax.Array:
    """Makes one seed of those of several devices, over axes over which `array` does not vary.

    What is encoded by it then does not vary over them either.
    """
    axes = varying_axes(seed) - varying_axes(array)
    return lax.psum(seed, tuple(sorted(axes))) if axes else seed


def varying_axes(array: jax.Array) -> frozenset[str]:
    """Returns the names of the mesh axes over which an array varies by its type."""
    return jax.typeof(array).manual_axis_type.varying


def filled(aval: Any, value: float) -> jax.Array:
    """Returns an array of one value, that varies over the mesh axes that `aval` varies over."""
    return vary(jnp.full(aval.shape, value, aval.dtype), aval.manual_axis_type.varying)


def type_like(array: jax.Array) -> Any:
    """Returns shape, dtype and type of an array, as `jax.linear_transpose` takes them.

    A `jax.ShapeDtypeStruct` lacks the mesh of the axes.
    """
    return jax.typeof(array).strip_weak_type()


def struct_like(array: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of a kernel's result that varies over the mesh axes of `array`."""
    varies = jax.typeof(array).manual_axis_type
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varies)
