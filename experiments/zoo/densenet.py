"""DenseNet-121 in Flax NNX. Source: arXiv:1608.06993."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike


class DenseLayer(nnx.Module):
    def __init__(
        self, cin: int, growth: int, *, dtype: DTypeLike | None = None, rngs: nnx.Rngs
    ) -> None:
        options: dict[str, Any] = dict(use_bias=False, dtype=dtype, rngs=rngs)
        self.norm1 = nnx.BatchNorm(cin, momentum=0.9, dtype=dtype, rngs=rngs)
        self.conv1 = nnx.Conv(cin, 4 * growth, (1, 1), **options)
        self.norm2 = nnx.BatchNorm(4 * growth, momentum=0.9, dtype=dtype, rngs=rngs)
        self.conv2 = nnx.Conv(4 * growth, growth, (3, 3), **options)

    def __call__(self, features: list[jax.Array]) -> jax.Array:
        x = jnp.concatenate(features, axis=-1)
        x = self.conv1(nnx.relu(self.norm1(x)))
        return self.conv2(nnx.relu(self.norm2(x)))


class DenseBlock(nnx.Module):
    def __init__(
        self, count: int, cin: int, growth: int, *, dtype: DTypeLike | None = None, rngs: nnx.Rngs
    ) -> None:
        self.layers = nnx.List(
            DenseLayer(cin + i * growth, growth, dtype=dtype, rngs=rngs) for i in range(count)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return jnp.concatenate(features, axis=-1)


class Transition(nnx.Module):
    def __init__(
        self, cin: int, cout: int, *, dtype: DTypeLike | None = None, rngs: nnx.Rngs
    ) -> None:
        self.norm = nnx.BatchNorm(cin, momentum=0.9, dtype=dtype, rngs=rngs)
        self.conv = nnx.Conv(cin, cout, (1, 1), use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.conv(nnx.relu(self.norm(x)))
        return nnx.avg_pool(x, (2, 2), (2, 2))


class DenseNet(nnx.Module):
    def __init__(
        self,
        blocks: tuple[int, int, int, int],
        growth: int = 32,
        num_classes: int = 1000,
        *,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        options: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        width = 2 * growth
        padding = [(3, 3), (3, 3)]
        self.conv0 = nnx.Conv(3, width, (7, 7), 2, padding=padding, use_bias=False, **options)
        self.norm0 = nnx.BatchNorm(width, momentum=0.9, **options)
        self.block1 = DenseBlock(blocks[0], width, growth, **options)
        width += blocks[0] * growth
        self.transition1 = Transition(width, width // 2, **options)
        width //= 2
        self.block2 = DenseBlock(blocks[1], width, growth, **options)
        width += blocks[1] * growth
        self.transition2 = Transition(width, width // 2, **options)
        width //= 2
        self.block3 = DenseBlock(blocks[2], width, growth, **options)
        width += blocks[2] * growth
        self.transition3 = Transition(width, width // 2, **options)
        width //= 2
        self.block4 = DenseBlock(blocks[3], width, growth, **options)
        width += blocks[3] * growth
        self.norm5 = nnx.BatchNorm(width, momentum=0.9, **options)
        self.classifier = nnx.Linear(width, num_classes, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm0(self.conv0(x)))
        x = nnx.max_pool(x, (3, 3), (2, 2), padding=[(1, 1), (1, 1)])
        x = self.transition1(self.block1(x))
        x = self.transition2(self.block2(x))
        x = self.transition3(self.block3(x))
        x = nnx.relu(self.norm5(self.block4(x)))
        return self.classifier(x.mean(axis=(1, 2)))


def densenet121(num_classes: int = 1000, **options: Any) -> DenseNet:
    return DenseNet((6, 12, 24, 16), 32, num_classes, **options)
