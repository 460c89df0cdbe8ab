"""Rounding that XLA keeps."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float


def to_bfloat16(x: Float[Array, "*shape"]) -> BFloat16[Array, "*shape"]:
    """The array in bfloat16, rounded also for what reads it as float32 in the same program.

    XLA for GPUs and TPUs drops a cast to bfloat16 and back. What an encoder would then make codes
    by is not what a decoder reads, and the difference does not average out.

    Example:
        >>> to_bfloat16(jnp.array([1.001, 1.005])).astype(jnp.float32).tolist()
        [1.0, 1.0078125]
    """
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7).astype(jnp.bfloat16)
