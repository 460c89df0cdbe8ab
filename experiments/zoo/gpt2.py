"""GPT-2 in Flax NNX."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike


class CausalSelfAttention(nnx.Module):
    def __init__(
        self, width: int, heads: int, *, dtype: DTypeLike | None = None, rngs: nnx.Rngs
    ) -> None:
        self.heads = heads
        self.c_attn = nnx.Linear(width, 3 * width, dtype=dtype, rngs=rngs)
        self.c_proj = nnx.Linear(width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        q, k, v = jnp.split(self.c_attn(x), 3, axis=-1)
        q = q.reshape(batch, length, self.heads, width // self.heads)
        k = k.reshape(batch, length, self.heads, width // self.heads)
        v = v.reshape(batch, length, self.heads, width // self.heads)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.reshape(batch, length, width))


class Block(nnx.Module):
    def __init__(
        self, width: int, heads: int, *, dtype: DTypeLike | None = None, rngs: nnx.Rngs
    ) -> None:
        options: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.ln_1 = nnx.LayerNorm(width, epsilon=1e-5, **options)
        self.attn = CausalSelfAttention(width, heads, **options)
        self.ln_2 = nnx.LayerNorm(width, epsilon=1e-5, **options)
        self.c_fc = nnx.Linear(width, 4 * width, **options)
        self.c_proj = nnx.Linear(4 * width, width, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(nnx.gelu(self.c_fc(self.ln_2(x))))


class GPT2(nnx.Module):
    def __init__(
        self,
        vocabulary: int = 50257,
        context: int = 1024,
        width: int = 768,
        depth: int = 12,
        heads: int = 12,
        *,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        options: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.wte = nnx.Embed(vocabulary, width, **options)
        self.wpe = nnx.Embed(context, width, **options)
        self.h = nnx.List(Block(width, heads, **options) for _ in range(depth))
        self.ln_f = nnx.LayerNorm(width, epsilon=1e-5, **options)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits of the next token."""
        x = self.wte(tokens) + self.wpe(jnp.arange(tokens.shape[1])[None])
        for block in self.h:
            x = block(x)
        return self.wte.attend(self.ln_f(x))
