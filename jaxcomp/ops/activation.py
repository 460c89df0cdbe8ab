"""Activations that keep a packed mask."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxcomp import residuals
from jaxcomp.codecs import Encoded, Packed

MASK = Packed(bits=1)


@jax.custom_vjp
def relu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`jax.nn.relu` that keeps one bit per element for the backward pass.

    Result and gradient are bit-identical to those of `jax.nn.relu`.

    Args:
        x: Array of any shape.

    Returns:
        `max(x, 0)`, in the dtype of `x`.

    Example:
        >>> jax.vmap(jax.grad(relu))(jnp.array([-1.0, 0.0, 2.0])).tolist()
        [0.0, 0.0, 1.0]
    """
    return jax.nn.relu(x)


def _forward(x: Array) -> tuple[Array, Encoded]:
    out = jax.nn.relu(x)
    return residuals.keep(out, MASK.encode(out > 0), MASK)


def _backward(mask: Encoded, cotangent: Array) -> tuple[Array]:
    mask, cotangent = residuals.tie(mask, cotangent)
    return (jnp.where(MASK.decode(mask), cotangent, jnp.zeros_like(cotangent)),)


relu.defvjp(_forward, _backward)
