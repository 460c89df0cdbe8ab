"""A vision transformer of the same blocks as the language model, and steps of both."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxcomp.models._lm import Block, Shape, Step, lm, step_of
from jaxcomp.planning import Strategy


class ViT(nnx.Module):
    """A vision transformer whose head takes the mean of the tokens."""

    def __init__(
        self,
        classes: int,
        image: int,
        patch: int,
        shape: Shape,
        *,
        channels: int = 3,
        dtype: DTypeLike = jnp.bfloat16,
        rngs: nnx.Rngs,
    ) -> None:
        tokens = (image // patch) ** 2
        self.stem = nnx.Conv(
            channels, shape.width, (patch, patch), patch, padding="VALID", dtype=dtype, rngs=rngs
        )
        self.position = nnx.Param(0.02 * jax.random.normal(rngs.params(), (tokens, shape.width)))
        self.blocks = nnx.List(Block(shape, False, dtype, rngs) for _ in range(shape.depth))
        self.norm = nnx.LayerNorm(shape.width, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(shape.width, classes, dtype=dtype, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits, (batch, classes)."""
        x = self.stem(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        x = x + self.position[...].astype(x.dtype)[None]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def long_lm(strategy: Strategy, batch: int) -> Step:
    """Makes the step of the language model on 8192 tokens."""
    return lm(strategy, batch, length=8192, queries=512)


def vit_b16(strategy: Strategy, batch: int) -> Step:
    """Makes the step of ViT-B/16 on images of 224 pixels and 1000 classes."""
    images = jax.ShapeDtypeStruct((224, 224, 3), jnp.bfloat16)
    labels = jax.ShapeDtypeStruct((), jnp.int32)
    shape = Shape(depth=12)
    return step_of(
        lambda: ViT(1000, 224, 16, shape, rngs=nnx.Rngs(0)), images, labels, strategy, batch
    )
