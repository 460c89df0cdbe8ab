"""CLIP ViT-B/32: contrastive training of images and texts with a softmax loss, in Flax Linen.

Source: arXiv:2103.00020.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.typing import DTypeLike

from experiments.zoo.scenarios.contrastive import Layer, shapes, unit
from experiments.zoo.scenarios.scenario import Around, Scenario


def quick_gelu(x: jax.Array) -> jax.Array:
    """An approximation of GELU by a sigmoid."""
    return x * jax.nn.sigmoid(1.702 * x)


class Tower(nn.Module):
    """Layers one after the other, between two norms or before one."""

    width: int
    depth: int
    dtype: DTypeLike
    remat: Any

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        normal = nn.initializers.normal(0.02)
        x += self.param("positions", normal, (1, *x.shape[1:])).astype(self.dtype)
        layer = self.remat(Layer)
        for i in range(self.depth):
            x, _ = layer(
                self.width, self.width // 64 or 1, self.dtype, quick_gelu, name=f"layer_{i}"
            )(x, mask)
        return nn.LayerNorm(dtype=self.dtype)(x)


class Clip(nn.Module):
    """Unit vectors of images and texts, and the temperature."""

    width: int = 768
    text_width: int = 512
    depth: int = 12
    vocabulary: int = 49_408
    patch: int = 32
    dtype: DTypeLike = jnp.bfloat16
    remat: Any = lambda layer: layer

    @nn.compact
    def __call__(self, images: jax.Array, texts: jax.Array) -> tuple[jax.Array, ...]:
        tower = functools.partial(Tower, depth=self.depth, dtype=self.dtype, remat=self.remat)
        project = functools.partial(nn.Dense, self.text_width, use_bias=False, dtype=self.dtype)
        patch = self.patch, self.patch
        x = nn.Conv(self.width, patch, patch, "VALID", use_bias=False, dtype=self.dtype)(images)
        x = x.reshape(len(images), -1, self.width)
        first = self.param("class", nn.initializers.normal(0.02), (1, 1, self.width))
        x = jnp.concatenate([jnp.tile(first.astype(x.dtype), (len(x), 1, 1)), x], axis=1)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        of_images = project()(tower(self.width, name="images")(x)[:, 0])
        x = nn.Embed(self.vocabulary, self.text_width, dtype=self.dtype)(texts)
        x = tower(self.text_width, name="texts")(x, nn.make_causal_mask(texts))
        of_texts = project()(jnp.take_along_axis(x, texts.argmax(-1)[:, None, None], axis=1)[:, 0])
        scale = self.param("scale", nn.initializers.constant(2.66), ())
        return unit(of_images), unit(of_texts), scale


def loss(
    model: Clip, around: Around, trained: Any, images: jax.Array, texts: jax.Array
) -> jax.Array:
    """The cross-entropy of each image's text among all, and of each text's image."""
    outputs: Any = model.clone(remat=around).apply({"params": trained}, images, texts)
    left, right, scale = outputs
    logits = jnp.exp(scale) * left @ right.T
    labels = jnp.arange(len(logits))
    entropy = optax.softmax_cross_entropy_with_integer_labels
    return (entropy(logits, labels) + entropy(logits.T, labels)).mean() / 2


MODEL = Clip()
SCENARIO = Scenario(
    functools.partial(loss, MODEL),
    functools.partial(shapes, model=MODEL, words=77),
    512,
    optax.adamw(1e-4),
    remat=nn.remat,
)
