"""The order of an array's elements in memory."""

from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array

from jaxcomp._core.one_device import on_one


def in_row_major(array: Array) -> Array:
    """Makes XLA for a GPU write an array in row-major order, or fuse what reads it in that order.

    Example:
        >>> import jax.numpy as jnp
        >>> in_row_major(jnp.ones((2, 3))).shape
        (2, 3)
    """
    return with_layout_constraint(array, Layout(tuple(range(array.ndim))))


def row_major_on_one_gpu(array: Array) -> Array:
    """Returns `in_row_major` of the array in a program for one GPU, and elsewhere the array.

    Example:
        >>> import jax.numpy as jnp
        >>> row_major_on_one_gpu(jnp.ones((2, 3))).shape
        (2, 3)
    """
    return on_one("cuda", in_row_major, lambda array: array)(array)
