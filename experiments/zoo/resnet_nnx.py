"""ResNet (v1.5) in Flax NNX. Source: arXiv:1512.03385."""

from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike


class BasicBlock(nnx.Module):
    expansion = 1

    def __init__(
        self,
        in_features: int,
        features: int,
        strides: int = 1,
        *,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        options: dict[str, Any] = dict(padding=[(1, 1), (1, 1)], use_bias=False, dtype=dtype)
        self.conv1 = nnx.Conv(in_features, features, (3, 3), strides, **options, rngs=rngs)
        self.bn1 = nnx.BatchNorm(features, momentum=0.9, dtype=dtype, rngs=rngs)
        self.conv2 = nnx.Conv(features, features, (3, 3), **options, rngs=rngs)
        self.bn2 = nnx.BatchNorm(features, momentum=0.9, dtype=dtype, rngs=rngs)
        self.downsample = (
            Downsample(in_features, features, strides, dtype=dtype, rngs=rngs)
            if strides != 1 or in_features != features
            else None
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        residual = x
        x = nnx.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        if self.downsample is not None:
            residual = self.downsample(residual)
        return nnx.relu(x + residual)


class Bottleneck(nnx.Module):
    expansion = 4

    def __init__(
        self,
        in_features: int,
        features: int,
        strides: int = 1,
        *,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        out = features * self.expansion
        options: dict[str, Any] = dict(use_bias=False, dtype=dtype, rngs=rngs)
        self.conv1 = nnx.Conv(in_features, features, (1, 1), **options)
        self.bn1 = nnx.BatchNorm(features, momentum=0.9, dtype=dtype, rngs=rngs)
        padding = [(1, 1), (1, 1)]
        self.conv2 = nnx.Conv(features, features, (3, 3), strides, padding=padding, **options)
        self.bn2 = nnx.BatchNorm(features, momentum=0.9, dtype=dtype, rngs=rngs)
        self.conv3 = nnx.Conv(features, out, (1, 1), **options)
        self.bn3 = nnx.BatchNorm(out, momentum=0.9, dtype=dtype, rngs=rngs)
        self.downsample = (
            Downsample(in_features, out, strides, dtype=dtype, rngs=rngs)
            if strides != 1 or in_features != out
            else None
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        residual = x
        x = nnx.relu(self.bn1(self.conv1(x)))
        x = nnx.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        if self.downsample is not None:
            residual = self.downsample(residual)
        return nnx.relu(x + residual)


class Downsample(nnx.Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        strides: int,
        *,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        self.conv = nnx.Conv(
            in_features, out_features, (1, 1), strides, use_bias=False, dtype=dtype, rngs=rngs
        )
        self.bn = nnx.BatchNorm(out_features, momentum=0.9, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.bn(self.conv(x))


class ResNet(nnx.Module):
    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        layers: tuple[int, ...],
        num_classes: int = 1000,
        *,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        padding = [(3, 3), (3, 3)]
        self.conv1 = nnx.Conv(
            3, 64, (7, 7), 2, padding=padding, use_bias=False, dtype=dtype, rngs=rngs
        )
        self.bn1 = nnx.BatchNorm(64, momentum=0.9, dtype=dtype, rngs=rngs)
        blocks, width = [], 64
        for stage, count in enumerate(layers):
            features = 64 * 2**stage
            for i in range(count):
                strides = 2 if stage > 0 and i == 0 else 1
                blocks.append(block(width, features, strides, dtype=dtype, rngs=rngs))
                width = features * block.expansion
        self.blocks = nnx.List(blocks)
        self.fc = nnx.Linear(width, num_classes, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.bn1(self.conv1(x)))
        x = nnx.max_pool(x, (3, 3), (2, 2), padding=[(1, 1), (1, 1)])
        for block in self.blocks:
            x = block(x)
        x = x.mean(axis=(1, 2))
        return self.fc(x)


def resnet18(num_classes: int = 1000, **options: Any) -> ResNet:
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes, **options)


def resnet50(num_classes: int = 1000, **options: Any) -> ResNet:
    return ResNet(Bottleneck, (3, 4, 6, 3), num_classes, **options)
