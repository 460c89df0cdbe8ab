"""Inside of `jax.shard_map`: over which mesh axes the values of an array vary."""

import typing

import jax
from jax import lax
from jax.typing import DTypeLike

T = typing.TypeVar("T")


def alike(operands: T) -> T:
    """The same arrays, each of the type that varies over every axis over which one of them does.

    A custom rule has to give each argument a gradient of the argument's own type. The batch varies
    over devices and so does all that a backward pass makes of it, a parameter does not: from here
    on it does, and JAX adds up its gradient over the devices. Outside of `jax.shard_map`, and with
    `check_vma=False`, nothing varies by type, and nothing is done.

    Args:
        operands: Any pytree of arrays.

    Example:
        >>> import jax.numpy as jnp
        >>> alike((jnp.ones(2), None))
        (Array([1., 1.], dtype=float32), None)
    """
    axes = frozenset().union(*map(_axes, jax.tree.leaves(operands)))

    def vary(leaf: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - _axes(leaf)))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(vary, operands)


def like(array: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a kernel's result that varies over the axes over which `array` does."""
    varies = jax.typeof(array).manual_axis_type
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varies)


def _axes(leaf: jax.Array) -> frozenset[str]:
    return jax.typeof(leaf).manual_axis_type.varying
