"""ViT-S/16 and ViT-B/16 in Flax NNX. Source: arXiv:2010.11929."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike


class EncoderBlock(nnx.Module):
    def __init__(
        self,
        hidden: int,
        heads: int,
        *,
        dropout: float = 0.0,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        options: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.norm1 = nnx.LayerNorm(hidden, **options)
        self.attn = nnx.MultiHeadAttention(heads, hidden, decode=False, **options)
        self.norm2 = nnx.LayerNorm(hidden, **options)
        self.mlp = nnx.Sequential(
            nnx.Linear(hidden, 4 * hidden, **options),
            nnx.gelu,
            nnx.Dropout(dropout, rngs=rngs),
            nnx.Linear(4 * hidden, hidden, **options),
            nnx.Dropout(dropout, rngs=rngs),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nnx.Module):
    def __init__(
        self,
        hidden: int,
        depth: int,
        heads: int,
        num_classes: int = 1000,
        *,
        image: int = 224,
        patch: int = 16,
        dropout: float = 0.0,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        options: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.patches = nnx.Conv(3, hidden, (patch, patch), patch, padding="VALID", **options)
        self.cls_token = nnx.Param(jnp.zeros((1, 1, hidden)))
        tokens = 1 + (image // patch) ** 2
        init = nnx.initializers.truncated_normal(0.02)
        self.positions = nnx.Param(init(rngs.params(), (1, tokens, hidden)))
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.blocks = nnx.List(
            EncoderBlock(hidden, heads, dropout=dropout, **options) for _ in range(depth)
        )
        self.norm = nnx.LayerNorm(hidden, **options)
        self.head = nnx.Linear(hidden, num_classes, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.patches(x)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        cls = jnp.broadcast_to(self.cls_token[...], (x.shape[0], 1, x.shape[-1]))
        x = jnp.concatenate([cls.astype(x.dtype), x], axis=1)
        x = self.dropout(x + self.positions[...].astype(x.dtype))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def vit_s16(num_classes: int = 1000, **options: Any) -> VisionTransformer:
    return VisionTransformer(384, 12, 6, num_classes, **options)


def vit_b16(num_classes: int = 1000, **options: Any) -> VisionTransformer:
    return VisionTransformer(768, 12, 12, num_classes, **options)
