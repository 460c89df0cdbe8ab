"""EfficientNet-B0 in Flax Linen. Source: arXiv:1905.11946."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

ModuleDef = Any

# expansion, features, blocks, stride, kernel
B0 = (
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)


class SqueezeExcite(nn.Module):
    features: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        s = x.mean(axis=(1, 2), keepdims=True)
        s = nn.swish(nn.Conv(self.features, (1, 1), dtype=self.dtype, name="reduce")(s))
        s = nn.Conv(x.shape[-1], (1, 1), dtype=self.dtype, name="expand")(s)
        return x * nn.sigmoid(s)


class MBConv(nn.Module):
    features: int
    expansion: int
    kernel: int
    stride: int
    drop_connect: float
    train: bool
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = partial(
            nn.BatchNorm,
            use_running_average=not self.train,
            momentum=0.99,
            epsilon=1e-3,
            dtype=self.dtype,
        )
        cin = x.shape[-1]
        width = cin * self.expansion
        y = x
        if self.expansion != 1:
            y = nn.swish(norm(name="bn_expand")(conv(width, (1, 1), name="expand")(y)))
        kernel, strides = (self.kernel, self.kernel), (self.stride, self.stride)
        y = conv(width, kernel, strides, feature_group_count=width, name="depthwise")(y)
        y = nn.swish(norm(name="bn_depthwise")(y))
        y = SqueezeExcite(max(1, cin // 4), self.dtype)(y)
        y = norm(name="bn_project")(conv(self.features, (1, 1), name="project")(y))
        if self.stride == 1 and cin == self.features:
            drop = nn.Dropout(
                self.drop_connect, broadcast_dims=(1, 2, 3), deterministic=not self.train
            )
            y = x + drop(y)
        return y


class EfficientNet(nn.Module):
    stages: tuple[tuple[int, ...], ...] = B0
    num_classes: int = 1000
    dropout: float = 0.2
    drop_connect: float = 0.2
    dtype: DTypeLike = jnp.float32
    remat: Callable[[ModuleDef], ModuleDef] = lambda block: block  # such as nn.remat

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        block = self.remat(MBConv)
        norm = partial(
            nn.BatchNorm,
            use_running_average=not train,
            momentum=0.99,
            epsilon=1e-3,
            dtype=self.dtype,
        )
        x = nn.Conv(32, (3, 3), (2, 2), use_bias=False, dtype=self.dtype, name="stem")(x)
        x = nn.swish(norm(name="bn_stem")(x))
        total = sum(count for _, _, count, _, _ in self.stages)
        number = 0
        for expansion, features, count, stride, kernel in self.stages:
            for i in range(count):
                x = block(
                    features,
                    expansion,
                    kernel,
                    stride if i == 0 else 1,
                    self.drop_connect * number / total,
                    train,
                    self.dtype,
                )(x)
                number += 1
        x = nn.Conv(1280, (1, 1), use_bias=False, dtype=self.dtype, name="top")(x)
        x = nn.swish(norm(name="bn_top")(x))
        x = x.mean(axis=(1, 2))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(self.num_classes, dtype=self.dtype, name="classifier")(x)
