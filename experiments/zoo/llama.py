"""A decoder with RMS norms, rotary positions, grouped queries and SwiGLU, in Flax Linen."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

ModuleDef = Any


class RMSNorm(nn.Module):
    epsilon: float = 1e-5
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.epsilon)
        return (y * scale).astype(self.dtype)


def rotary(x: jax.Array, base: float = 10000.0) -> jax.Array:
    """Rotates pairs of features of (batch, length, heads, features) by their position."""
    length, features = x.shape[1], x.shape[-1]
    frequencies = base ** (-jnp.arange(0, features, 2) / features)
    angles = jnp.arange(length)[:, None] * frequencies[None, :]
    cos, sin = jnp.cos(angles)[None, :, None, :], jnp.sin(angles)[None, :, None, :]
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)


class Attention(nn.Module):
    heads: int
    kv_heads: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        dense = partial(nn.DenseGeneral, use_bias=False, dtype=self.dtype)
        q = dense((self.heads, width // self.heads), name="wq")(x)
        k = dense((self.kv_heads, width // self.heads), name="wk")(x)
        v = dense((self.kv_heads, width // self.heads), name="wv")(x)
        y = jax.nn.dot_product_attention(rotary(q), rotary(k), v, is_causal=True)
        return dense(width, axis=(-2, -1), name="wo")(y)


class FeedForward(nn.Module):
    hidden: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dense = partial(nn.Dense, use_bias=False, dtype=self.dtype)
        gate = nn.silu(dense(self.hidden, name="w1")(x))
        return dense(x.shape[-1], name="w2")(gate * dense(self.hidden, name="w3")(x))


class DecoderBlock(nn.Module):
    heads: int
    kv_heads: int
    hidden: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = RMSNorm(dtype=self.dtype, name="attention_norm")(x)
        x = x + Attention(self.heads, self.kv_heads, self.dtype, name="attention")(y)
        y = RMSNorm(dtype=self.dtype, name="ffn_norm")(x)
        return x + FeedForward(self.hidden, self.dtype, name="feed_forward")(y)


class Llama(nn.Module):
    vocabulary: int = 32000
    width: int = 768
    depth: int = 12
    heads: int = 12
    kv_heads: int = 4
    hidden: int = 2048
    dtype: DTypeLike = jnp.float32
    remat: Callable[[ModuleDef], ModuleDef] = lambda block: block  # such as nn.remat

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool = True) -> jax.Array:
        """Logits of the next token."""
        block = self.remat(DecoderBlock)
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)
        for i in range(self.depth):
            x = block(self.heads, self.kv_heads, self.hidden, self.dtype, name=f"layers_{i}")(x)
        x = RMSNorm(dtype=self.dtype, name="norm")(x)
        return nn.Dense(self.vocabulary, use_bias=False, dtype=self.dtype, name="output")(x)
