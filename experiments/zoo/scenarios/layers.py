"""Parts that several scenarios have."""

from typing import Any

import jax
import jax.numpy as jnp


def layer_norm(params: Any, x: jax.Array, epsilon: float = 1e-5) -> jax.Array:
    """Normalizes features in float32."""
    y = x.astype(jnp.float32)
    y -= y.mean(axis=-1, keepdims=True)
    y *= jax.lax.rsqrt(jnp.square(y).mean(axis=-1, keepdims=True) + epsilon)
    return (y * params["scale"] + params["offset"]).astype(x.dtype)
