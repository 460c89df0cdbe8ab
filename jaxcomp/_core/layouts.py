"""The order of an array's elements in memory."""

from typing import TypeVar

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array

from jaxcomp._core.one_device import on_one

T = TypeVar("T")


def in_row_major(array: Array) -> Array:
    """Makes XLA write an array in row-major order, or fuse what reads it in that order.

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


def as_convolved(tree: T) -> T:
    """Gives 3D volumes with channels last the order in which XLA for one GPU convolves them.

    That is with the channels first. Other arrays, and programs for other devices, are unchanged. A
    barrier has the order of rows, unless another one is asked for: XLA would transpose all volumes
    before and after each barrier.

    Args:
        tree: Any pytree of arrays; those of shape (batch, depth, height, width, channels) count.

    Example:
        >>> import jax.numpy as jnp
        >>> as_convolved(jnp.ones((1, 4, 4, 4, 2))).shape
        (1, 4, 4, 4, 2)
    """

    def ordered(array: Array) -> Array:
        if array.ndim != 5:
            return array
        return on_one("cuda", _channels_first, lambda array: array)(array)

    return jax.tree.map(ordered, tree)


def _channels_first(array: Array) -> Array:
    return with_layout_constraint(array, Layout((0, 4, 1, 2, 3)))
