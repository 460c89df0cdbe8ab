"""Row-major order for gradients of kernels."""

from jax import lax
from jaxtyping import Array, Float

from jaxcomp._core.one_device import on_one


def row_major(gradient: Float[Array, "..."]) -> Float[Array, "..."]:
    """Makes XLA write an array in row-major order, in a program for one GPU.

    cuDNN writes a kernel's gradient with the features first. XLA would reorder it in the
    optimizer's step. That step could then not run in place, and XLA would copy parameters and
    momenta.

    Args:
        gradient: Gradient of a kernel, in the dtype of the product that computed it.

    Returns:
        The same array.

    Example:
        >>> import jax.numpy as jnp
        >>> row_major(jnp.ones((3, 3, 4, 8))).shape
        (3, 3, 4, 8)
    """
    return on_one("cuda", _flattened, lambda gradient: gradient)(gradient)


def _flattened(gradient: Array) -> Array:
    """Places a barrier around the flat array, which has only one order."""
    return lax.optimization_barrier(gradient.ravel()).reshape(gradient.shape)
