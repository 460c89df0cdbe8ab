"""A kernel's gradient in the order of its parameter."""

from jax import lax
from jaxtyping import Array, Float

from jaxcomp.ops._one_device import on_one


def row_major(gradient: Float[Array, "..."]) -> Float[Array, "..."]:
    """The same array, which in a program for one GPU is in memory in row-major order.

    cuDNN writes a kernel's gradient with the features first. XLA then leaves it to the optimiser's
    step to reorder it, which cannot be in place so, and copies parameters and momenta.

    Args:
        gradient: Of a kernel, in the dtype of the product that made it.

    Example:
        >>> import jax.numpy as jnp
        >>> row_major(jnp.ones((3, 3, 4, 8))).shape
        (3, 3, 4, 8)
    """
    return on_one("cuda", _flattened, lambda gradient: gradient)(gradient)


def _flattened(gradient: Array) -> Array:
    """With a barrier around the only shape that has one order."""
    return lax.optimization_barrier(gradient.ravel()).reshape(gradient.shape)
