"""Rounding that XLA does not remove."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float


def to_bfloat16(x: Float[Array, "*shape"]) -> BFloat16[Array, "*shape"]:
    """Rounds an array to bfloat16, also for operations that read it as float32 in the same program.

    XLA for GPUs and TPUs removes a cast to bfloat16 and back. Without this function, an encoder
    would use other values than the decoder reads, and the difference would be a bias.

    Args:
        x: Floating-point array.

    Returns:
        The rounded array.

    Example:
        >>> to_bfloat16(jnp.array([1.001, 1.005])).astype(jnp.float32).tolist()
        [1.0, 1.0078125]
    """
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7).astype(jnp.bfloat16)
