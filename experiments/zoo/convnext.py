"""ConvNeXt-T in Flax NNX. Source: arXiv:2201.03545."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike


class Block(nnx.Module):
    def __init__(
        self, dim: int, drop_path: float, *, dtype: DTypeLike | None = None, rngs: nnx.Rngs
    ) -> None:
        self.dwconv = nnx.Conv(dim, dim, (7, 7), feature_group_count=dim, dtype=dtype, rngs=rngs)
        self.norm = nnx.LayerNorm(dim, epsilon=1e-6, dtype=dtype, rngs=rngs)
        self.pwconv1 = nnx.Linear(dim, 4 * dim, dtype=dtype, rngs=rngs)
        self.pwconv2 = nnx.Linear(4 * dim, dim, dtype=dtype, rngs=rngs)
        self.gamma = nnx.Param(jnp.full((dim,), 1e-6))
        self.drop_path = nnx.Dropout(drop_path, broadcast_dims=(1, 2, 3), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norm(self.dwconv(x))
        y = self.pwconv2(nnx.gelu(self.pwconv1(y)))
        y = y * self.gamma[...].astype(y.dtype)
        return x + self.drop_path(y)


class Downsample(nnx.Module):
    def __init__(
        self, cin: int, cout: int, *, dtype: DTypeLike | None = None, rngs: nnx.Rngs
    ) -> None:
        self.norm = nnx.LayerNorm(cin, epsilon=1e-6, dtype=dtype, rngs=rngs)
        self.conv = nnx.Conv(cin, cout, (2, 2), 2, padding="VALID", dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.conv(self.norm(x))


class ConvNeXt(nnx.Module):
    def __init__(
        self,
        depths: tuple[int, ...],
        dims: tuple[int, ...],
        num_classes: int = 1000,
        *,
        drop_path: float = 0.1,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        options: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.stem = nnx.Conv(3, dims[0], (4, 4), 4, padding="VALID", **options)
        self.stem_norm = nnx.LayerNorm(dims[0], epsilon=1e-6, **options)
        rates = (drop_path * i / max(1, sum(depths) - 1) for i in range(sum(depths)))
        layers: list[nnx.Module] = []
        for stage, depth in enumerate(depths):
            if stage > 0:
                layers.append(Downsample(dims[stage - 1], dims[stage], **options))
            layers += [Block(dims[stage], next(rates), **options) for _ in range(depth)]
        self.layers = nnx.List(layers)
        self.norm = nnx.LayerNorm(dims[-1], epsilon=1e-6, **options)
        self.head = nnx.Linear(dims[-1], num_classes, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.stem_norm(self.stem(x))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x.mean(axis=(1, 2))))


def convnext_tiny(num_classes: int = 1000, **options: Any) -> ConvNeXt:
    return ConvNeXt((3, 3, 9, 3), (96, 192, 384, 768), num_classes, **options)
