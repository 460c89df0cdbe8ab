"""ResMLP in Flax NNX. Source: arXiv:2105.03404."""

from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike


class Affine(nnx.Module):
    def __init__(self, features: int, scale: float = 1.0, bias: bool = True) -> None:
        self.scale = nnx.Param(jax.numpy.full(features, scale))
        self.bias = nnx.Param(jax.numpy.zeros(features)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x * self.scale[...].astype(x.dtype)
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)


class Block(nnx.Module):
    def __init__(self, tokens: int, features: int, scale: float, options: dict[str, Any]) -> None:
        self.norm1, self.norm2 = Affine(features), Affine(features)
        self.mixing = nnx.Linear(tokens, tokens, **options)
        self.scale1, self.scale2 = (Affine(features, scale, bias=False) for _ in range(2))
        self.fc1 = nnx.Linear(features, 4 * features, **options)
        self.fc2 = nnx.Linear(4 * features, features, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        mixed = self.mixing(self.norm1(x).swapaxes(1, 2)).swapaxes(1, 2)
        x = x + self.scale1(mixed)
        return x + self.scale2(self.fc2(nnx.gelu(self.fc1(self.norm2(x)))))


class ResMLP(nnx.Module):
    def __init__(
        self,
        depth: int = 24,
        features: int = 384,
        *,
        patch: int = 16,
        size: int = 224,
        classes: int = 1000,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        options: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.stem = nnx.Conv(3, features, (patch, patch), patch, padding="VALID", **options)
        tokens = (size // patch) ** 2
        blocks = [Block(tokens, features, 1e-5, options) for _ in range(depth)]
        self.blocks = nnx.List(blocks)
        self.norm = Affine(features)
        self.head = nnx.Linear(features, classes, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.stem(x)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(axis=1))
