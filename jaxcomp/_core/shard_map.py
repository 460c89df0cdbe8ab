"""Inside of `jax.shard_map`: over which mesh axes the values of an array vary.

Its types say so where it checks them (`check_vma=True`, the default). Outside, and without the
check, nothing varies by type.
"""

import typing

import jax
from jax import lax
from jax.typing import DTypeLike

T = typing.TypeVar("T")


def match_varying(operands: T) -> T:
    """The same arrays, each of the type that varies over every axis over which one of them does.

    A custom rule has to give each argument a gradient of the argument's own type. The batch varies
    over devices and so does all that a backward pass makes of it, a parameter does not: from here
    on it does, and JAX adds up its gradient over the devices.

    Args:
        operands: Any pytree of arrays.

    Example:
        >>> import jax.numpy as jnp
        >>> match_varying((jnp.ones(2), None))
        (Array([1., 1.], dtype=float32), None)
    """
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves(operands)))

    def vary(leaf: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - varying_axes(leaf)))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(vary, operands)


def varying_axes(array: jax.Array) -> frozenset[str]:
    """The names of the mesh axes over which an array varies by its type."""
    return jax.typeof(array).manual_axis_type.varying


def type_like(array: jax.Array) -> typing.Any:
    """An array's shape, dtype and type, as `jax.linear_transpose` takes them.

    A `jax.ShapeDtypeStruct` does not say of which mesh the axes are.
    """
    return jax.typeof(array).strip_weak_type()


def struct_like(array: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a kernel's result that varies over the axes over which `array` does."""
    varies = jax.typeof(array).manual_axis_type
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varies)
