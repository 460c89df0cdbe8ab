"""VGG-19, with and without batch norms, in Flax Linen. Source: arXiv:1409.1556."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

ModuleDef = Any


class Stage(nn.Module):
    features: int
    count: int
    batch_norm: bool
    train: bool
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.count):
            x = nn.Conv(self.features, (3, 3), dtype=self.dtype)(x)
            if self.batch_norm:
                x = nn.BatchNorm(
                    use_running_average=not self.train, momentum=0.9, dtype=self.dtype
                )(x)
            x = nn.relu(x)
        return nn.max_pool(x, (2, 2), strides=(2, 2))


class VGG(nn.Module):
    stages: tuple[tuple[int, int], ...]
    batch_norm: bool = False
    hidden: int = 4096
    num_classes: int = 1000
    dtype: DTypeLike = jnp.float32
    remat: Callable[[ModuleDef], ModuleDef] = lambda block: block  # such as nn.remat

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        stage = self.remat(Stage)
        for features, count in self.stages:
            x = stage(features, count, self.batch_norm, train, self.dtype)(x)
        x = x.reshape(x.shape[0], -1)
        for _ in range(2):
            x = nn.relu(nn.Dense(self.hidden, dtype=self.dtype)(x))
            x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(self.num_classes, dtype=self.dtype)(x)


VGG19 = partial(VGG, ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)))
