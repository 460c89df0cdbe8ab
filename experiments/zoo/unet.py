"""U-Net for biomedical images, with batch norms, in Flax Linen. Source: arXiv:1505.04597."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

ModuleDef = Any


class DoubleConv(nn.Module):
    features: int
    train: bool
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = nn.Conv(self.features, (3, 3), use_bias=False, dtype=self.dtype)(x)
            x = nn.BatchNorm(use_running_average=not self.train, momentum=0.9, dtype=self.dtype)(x)
            x = nn.relu(x)
        return x


class UNet(nn.Module):
    features: tuple[int, ...] = (64, 128, 256, 512, 1024)
    num_classes: int = 2
    dtype: DTypeLike = jnp.float32
    remat: Callable[[ModuleDef], ModuleDef] = lambda block: block  # such as nn.remat

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        """Logits of each pixel."""
        double_conv = self.remat(DoubleConv)
        skips = []
        for features in self.features[:-1]:
            x = double_conv(features, train, self.dtype)(x)
            skips.append(x)
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = double_conv(self.features[-1], train, self.dtype)(x)
        for features, skip in zip(self.features[-2::-1], reversed(skips), strict=True):
            x = nn.ConvTranspose(features, (2, 2), strides=(2, 2), dtype=self.dtype)(x)
            x = jnp.concatenate([skip, x], axis=-1)
            x = double_conv(features, train, self.dtype)(x)
        return nn.Conv(self.num_classes, (1, 1), dtype=self.dtype)(x)
