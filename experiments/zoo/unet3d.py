"""A 3D U-Net for medical volumes, with instance norms and leaky ReLUs, in Flax NNX.

Its form is that of nnU-Net: arXiv:1904.08128.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike


class ConvNormAct(nnx.Module):
    """A convolution, an instance norm and a leaky ReLU."""

    def __init__(
        self, inputs: int, features: int, stride: int, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        self.conv = nnx.Conv(
            inputs, features, (3, 3, 3), strides=stride, dtype=dtype, rngs=rngs, use_bias=True
        )
        self.norm = nnx.InstanceNorm(features, epsilon=1e-5, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.leaky_relu(self.norm(self.conv(x)), 0.01)


class Stage(nnx.Module):
    """Two convolutions; the first has the stride."""

    def __init__(
        self, inputs: int, features: int, stride: int, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        self.first = ConvNormAct(inputs, features, stride, dtype, rngs)
        self.second = ConvNormAct(features, features, 1, dtype, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(self.first(x))


class UNet3D(nnx.Module):
    """The network."""

    def __init__(
        self,
        features: tuple[int, ...] = (32, 64, 128, 256, 320, 320),
        classes: int = 3,
        *,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        stage = functools.partial(Stage, dtype=dtype, rngs=rngs)
        before = (1, *features)
        self.encoder = nnx.List(
            [stage(before[i], n, 1 if i == 0 else 2) for i, n in enumerate(features)]
        )
        wide_to_narrow = list(zip(features[:0:-1], features[-2::-1], strict=True))
        self.upsample = nnx.List(
            [
                nnx.ConvTranspose(wide, n, (2, 2, 2), strides=(2, 2, 2), dtype=dtype, rngs=rngs)
                for wide, n in wide_to_narrow
            ]
        )
        self.decoder = nnx.List([stage(2 * n, n, 1) for _, n in wide_to_narrow])
        self.head = nnx.Conv(features[0], classes, (1, 1, 1), dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits of each voxel."""
        skips = []
        for stage in self.encoder:
            x = stage(x)
            skips.append(x)
        for upsample, stage, skip in zip(self.upsample, self.decoder, skips[-2::-1], strict=True):
            x = stage(jnp.concatenate([upsample(x), skip], axis=-1))
        return self.head(x)
