"""Row-major order for gradients of kernels and for operands of matrix products."""

from jax import lax
from jaxtyping import Array, Float

from jaxcomp._core.layouts import row_major_on_one_gpu
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


def row_major_operand(operand: Float[Array, "..."]) -> Float[Array, "..."]:
    """Makes XLA write a feature map in row-major order, in a program for one GPU.

    XLA prefers a layout in which the range of each channel is a reduction of adjacent elements:
    channels before the map. A value takes this layout if no convolution decides on another. Then
    the matrix product that reads the value transposes it. In JAX 0.10, XLA's compiler for absent
    GPUs rejects such a product unless the map's edges are multiples of its tiles.

    Args:
        operand: Array whose last axis a matrix product contracts.

    Returns:
        The same array.

    Example:
        >>> import jax.numpy as jnp
        >>> row_major_operand(jnp.ones((8, 16, 16, 32))).shape
        (8, 16, 16, 32)
    """
    if operand.ndim < 4:
        return operand
    return row_major_on_one_gpu(operand)
