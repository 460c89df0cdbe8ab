"""A U-Net that predicts the noise of latent images, with group norms and attentions, in Flax NNX.

Its form is that of latent diffusion: arXiv:2112.10752.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike


class ResBlock(nnx.Module):
    """Group norm, SiLU and convolution, twice, with the embedding of the time between."""

    def __init__(
        self, inputs: int, features: int, embedding: int, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        norm = functools.partial(nnx.GroupNorm, epsilon=1e-5, dtype=dtype, rngs=rngs)
        conv = functools.partial(nnx.Conv, dtype=dtype, rngs=rngs)
        self.norm1, self.conv1 = norm(inputs), conv(inputs, features, (3, 3))
        self.of_time = nnx.Linear(embedding, features, dtype=dtype, rngs=rngs)
        self.norm2, self.conv2 = norm(features), conv(features, features, (3, 3))
        self.skip = conv(inputs, features, (1, 1)) if inputs != features else None

    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        h = self.conv1(nnx.silu(self.norm1(x)))
        h += self.of_time(nnx.silu(time))[:, None, None]
        h = self.conv2(nnx.silu(self.norm2(h)))
        return h + (x if self.skip is None else self.skip(x))


class Attention(nnx.Module):
    """Attention of all pixels to all."""

    def __init__(self, features: int, heads: int, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.norm = nnx.GroupNorm(features, epsilon=1e-5, dtype=dtype, rngs=rngs)
        self.qkv = nnx.Linear(features, 3 * features, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(features, features, dtype=dtype, rngs=rngs)
        self.heads = heads

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, height, width, features = x.shape
        h = self.norm(x).reshape(batch, height * width, features)
        q, k, v = (
            part.reshape(batch, height * width, self.heads, -1)
            for part in jnp.split(self.qkv(h), 3, axis=-1)
        )
        mixed = jax.nn.dot_product_attention(q, k, v)
        return x + self.out(mixed.reshape(h.shape)).reshape(x.shape)


class Block(nnx.Module):
    """A residual block, and an attention if it has `heads`."""

    def __init__(
        self,
        inputs: int,
        features: int,
        embedding: int,
        heads: int,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        self.block = ResBlock(inputs, features, embedding, dtype, rngs)
        self.attention = Attention(features, heads, dtype, rngs) if heads else None

    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        x = self.block(x, time)
        return x if self.attention is None else self.attention(x)


class DiffusionUNet(nnx.Module):
    """The network.

    Args:
        widths: Features of each resolution, of which each has half the pixels along an axis.
        attends: Whether each resolution has attentions.
        channels: Of the latent images.
        blocks: Residual blocks at each resolution.
        heads: Of each attention.
        dtype: Of the computation.
        rngs: Random numbers of the parameters.
    """

    def __init__(
        self,
        widths: tuple[int, ...] = (128, 256, 512, 512),
        attends: tuple[bool, ...] = (False, True, True, False),
        channels: int = 4,
        blocks: int = 2,
        heads: int = 8,
        *,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.channels, self.width = channels, widths[0]
        embedding = 4 * widths[0]
        linear = functools.partial(nnx.Linear, dtype=dtype, rngs=rngs)
        conv = functools.partial(nnx.Conv, dtype=dtype, rngs=rngs)
        block = functools.partial(Block, embedding=embedding, dtype=dtype, rngs=rngs)
        self.time1, self.time2 = linear(widths[0], embedding), linear(embedding, embedding)
        self.first = conv(channels, widths[0], (3, 3))
        self.down: Any = nnx.List([])
        self.halve: Any = nnx.List([])
        self.up: Any = nnx.List([])
        self.double: Any = nnx.List([])
        now, skips = widths[0], [widths[0]]
        for level, (width, attend) in enumerate(zip(widths, attends, strict=True)):
            for _ in range(blocks):
                self.down.append(block(now, width, heads=attend * heads))
                now = width
                skips.append(now)
            if level + 1 < len(widths):
                self.halve.append(conv(now, now, (3, 3), strides=2))
                skips.append(now)
        self.middle = nnx.List([block(now, now, heads=heads), block(now, now, heads=0)])
        for level, (width, attend) in reversed(list(enumerate(zip(widths, attends, strict=True)))):
            for _ in range(blocks + 1):
                self.up.append(block(now + skips.pop(), width, heads=attend * heads))
                now = width
            if level:
                self.double.append(conv(now, now, (3, 3)))
        self.norm = nnx.GroupNorm(now, epsilon=1e-5, dtype=dtype, rngs=rngs)
        self.last = conv(now, channels, (3, 3))
        self.blocks = blocks

    def __call__(self, x: jax.Array, times: jax.Array) -> jax.Array:
        """The predicted noise of latent images, each at a time between 0 and 1,000."""
        time = self.time2(nnx.silu(self.time1(sinusoids(times, self.width).astype(x.dtype))))
        x = self.first(x)
        skips = [x]
        for level in range(len(self.halve) + 1):
            for block in self.down[level * self.blocks : (level + 1) * self.blocks]:
                x = block(x, time)
                skips.append(x)
            if level < len(self.halve):
                x = self.halve[level](x)
                skips.append(x)
        for block in self.middle:
            x = block(x, time)
        for level in range(len(self.double) + 1):
            for block in self.up[level * (self.blocks + 1) : (level + 1) * (self.blocks + 1)]:
                x = block(jnp.concatenate([x, skips.pop()], axis=-1), time)
            if level < len(self.double):
                x = self.double[level](x.repeat(2, axis=1).repeat(2, axis=2))
        return self.last(nnx.silu(self.norm(x)))


def sinusoids(times: jax.Array, features: int) -> jax.Array:
    """The embedding of times by sines and cosines."""
    rates = jnp.exp(-jnp.log(10_000) * jnp.arange(features // 2) / (features // 2))
    angles = times[:, None] * rates[None]
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def noised(images: jax.Array, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Latent images with noise, by the cosine schedule, and their times, which are stratified."""
    count = images.shape[0]
    times = (jnp.arange(count) + 0.5) / count
    angle = (times * jnp.pi / 2).astype(images.dtype)[:, None, None, None]
    return jnp.cos(angle) * images + jnp.sin(angle) * noise, 1_000 * times
