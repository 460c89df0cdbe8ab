"""Contrastive training of images and texts with a sigmoid loss, in Flax Linen.

Its form is that of SigLIP (arXiv:2303.15343) in big_vision: layers in a scan.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.typing import DTypeLike

from experiments.zoo.scenarios.scenario import Around, Scenario


class Layer(nn.Module):
    """A layer of a transformer with norms before its parts."""

    width: int
    heads: int
    dtype: DTypeLike
    activation: Callable[[jax.Array], jax.Array] = nn.gelu

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None) -> tuple[jax.Array, None]:
        y = nn.LayerNorm(dtype=self.dtype)(x)
        x += nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(y, mask=mask)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = self.activation(nn.Dense(4 * self.width, dtype=self.dtype)(y))
        return x + nn.Dense(self.width, dtype=self.dtype)(y), None


class Encoder(nn.Module):
    """Layers in a scan, and attention pooling by one query."""

    width: int
    heads: int
    depth: int
    dtype: DTypeLike
    remat: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        normal = nn.initializers.normal(0.02)
        x += self.param("positions", normal, (1, *x.shape[1:])).astype(self.dtype)
        layers = nn.scan(
            self.remat(Layer),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.depth,
        )
        x, _ = layers(self.width, self.heads, self.dtype, name="layers")(x, None)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        probe = self.param("probe", normal, (1, 1, self.width)).astype(self.dtype)
        probe = jnp.tile(probe, (len(x), 1, 1))
        return nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(probe, x)[:, 0]


class TwoTowers(nn.Module):
    """Unit vectors of images and texts, the temperature and the bias of the loss."""

    width: int = 768
    heads: int = 12
    depth: int = 12
    vocabulary: int = 32_000
    patch: int = 16
    dtype: DTypeLike = jnp.bfloat16
    remat: Any = lambda layer: layer

    @nn.compact
    def __call__(self, images: jax.Array, texts: jax.Array) -> tuple[jax.Array, ...]:
        encoder = functools.partial(
            Encoder, self.width, self.heads, self.depth, self.dtype, self.remat
        )
        patch = self.patch, self.patch
        patches = nn.Conv(self.width, patch, patch, padding="VALID", dtype=self.dtype)(images)
        of_images = encoder(name="images")(patches.reshape(len(images), -1, self.width))
        embedded = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(texts)
        of_texts = encoder(name="texts")(embedded)
        scale = self.param("scale", nn.initializers.constant(2.3), ())
        bias = self.param("bias", nn.initializers.constant(-10.0), ())
        return unit(of_images), unit(of_texts), scale, bias


def unit(x: jax.Array) -> jax.Array:
    """Vectors of length 1, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.square(x).sum(axis=-1, keepdims=True) + 1e-8)


def loss(
    model: TwoTowers, around: Around, trained: Any, images: jax.Array, texts: jax.Array
) -> jax.Array:
    """The sigmoid loss of all pairs."""
    outputs: Any = model.clone(remat=around).apply({"params": trained}, images, texts)
    left, right, scale, bias = outputs
    logits = jnp.exp(scale) * left @ right.T + bias
    return -jax.nn.log_sigmoid(logits * (2 * jnp.eye(len(logits)) - 1)).sum(axis=-1).mean()


def shapes(
    batch: int, model: nn.Module, pixels: int = 224, words: int = 64
) -> tuple[Any, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """The shapes of the parameters and of a batch of pairs."""
    images = jax.ShapeDtypeStruct((batch, pixels, pixels, 3), model.dtype)
    texts = jax.ShapeDtypeStruct((batch, words), jnp.int32)
    trained = jax.eval_shape(model.init, jax.random.key(0), images, texts)["params"]
    return trained, images, texts


MODEL = TwoTowers()
SCENARIO = Scenario(
    functools.partial(loss, MODEL),
    functools.partial(shapes, model=MODEL),
    1024,
    optax.adamw(1e-4),
    remat=nn.remat,
)
