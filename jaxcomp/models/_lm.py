"""A decoder language model in plain Flax NNX, and its training step.

The model uses nothing of jaxcomp. A strategy is applied to it when its step is made.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxcomp.models import training
from jaxcomp.planning import Strategy


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a transformer.

    Attributes:
        width: Features of a token.
        depth: Number of blocks.
        heads: Heads of each attention.
        queries: Queries that attend at once; a longer sequence is processed in chunks.
    """

    width: int = 768
    depth: int = 6
    heads: int = 12
    queries: int = 1024


class Attention(nnx.Module):
    """Multi-head attention, whose scores are recomputed in the backward pass."""

    def __init__(self, shape: Shape, causal: bool, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.heads, self.queries, self.causal = shape.heads, shape.queries, causal
        self.qkv = nnx.Linear(shape.width, 3 * shape.width, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(shape.width, shape.width, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = (
            part.reshape(*x.shape[:2], self.heads, -1) for part in jnp.split(self.qkv(x), 3, -1)
        )

        mixed = jax.checkpoint(attend, static_argnums=(3, 4))(q, k, v, self.causal, self.queries)
        return self.out(mixed.reshape(x.shape))


def attend(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool, queries: int) -> jax.Array:
    """Returns an attention of (batch, length, heads, features), in chunks of `queries`."""
    length = q.shape[1]
    if length <= queries:
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal)
    if length % queries:
        raise ValueError(f"queries={queries}: expected a divisor of the length, {length}")

    @jax.checkpoint
    def some(start: jax.Array) -> jax.Array:
        part = jax.lax.dynamic_slice_in_dim(q, start, queries, axis=1)
        before = start + jnp.arange(queries)[:, None] >= jnp.arange(length)[None]
        mask = before[None, None] if causal else None
        return jax.nn.dot_product_attention(part, k, v, mask=mask)

    parts = jax.lax.map(some, jnp.arange(0, length, queries))
    return jnp.moveaxis(parts, 0, 1).reshape(q.shape)


class Block(nnx.Module):
    """A pre-norm block."""

    def __init__(self, shape: Shape, causal: bool, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        width = shape.width
        self.norm1 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.attention = Attention(shape, causal, dtype, rngs)
        self.norm2 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


class LM(nnx.Module):
    """A decoder language model with tied embeddings."""

    def __init__(
        self,
        vocabulary: int,
        length: int,
        shape: Shape = Shape(),
        *,
        dtype: DTypeLike = jnp.bfloat16,
        rngs: nnx.Rngs,
    ) -> None:
        self.embed = nnx.Embed(vocabulary, shape.width, dtype=dtype, rngs=rngs)
        self.position = nnx.Embed(length, shape.width, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List(Block(shape, True, dtype, rngs) for _ in range(shape.depth))
        self.norm = nnx.LayerNorm(shape.width, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits of the next token, (batch, length, vocabulary)."""
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1])[None])
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


Body = Callable[[jax.Array, Block], jax.Array]


class ScannedLM(nnx.Module):
    """The language model with its blocks under Flax's `scan`, so that one block is compiled.

    Args:
        around: Transformation of the body of the loop, such as `nnx.remat`.
    """

    def __init__(
        self,
        vocabulary: int,
        length: int,
        shape: Shape = Shape(),
        *,
        around: Callable[[Body], Body] = lambda body: body,
        dtype: DTypeLike = jnp.bfloat16,
        rngs: nnx.Rngs,
    ) -> None:
        @nnx.split_rngs(splits=shape.depth)
        @nnx.vmap
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(shape, True, dtype, rngs)

        self.around = around
        self.embed = nnx.Embed(vocabulary, shape.width, dtype=dtype, rngs=rngs)
        self.position = nnx.Embed(length, shape.width, dtype=dtype, rngs=rngs)
        self.blocks = stack(rngs)
        self.norm = nnx.LayerNorm(shape.width, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits of the next token, (batch, length, vocabulary)."""

        def run(x: jax.Array, block: Block) -> jax.Array:
            return block(x)

        through = nnx.scan(self.around(run), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1])[None])
        return self.embed.attend(self.norm(through(x, self.blocks)))


Step = tuple[Callable[..., Any], tuple[Any, ...]]
"""A jitted AdamW step and the shapes of its arguments."""


def step_of(
    make: Callable[[], nnx.Module],
    inputs: Any,
    labels: Any,
    strategy: Strategy,
    batch: int,
    *,
    unroll: bool = True,
) -> Step:
    """Returns the step of a model; `inputs` and `labels` are the shapes of one example."""
    model = strategy(nnx.eval_shape(make))
    optimizer = training.adamw(lambda count: 1e-3, weight_decay=0.1)
    loss_fn = training.make_loss(model, label_smoothing=0.0)
    step = training.make_train_step(loss_fn, optimizer, strategy.micro_batches, unroll=unroll)
    state = jax.eval_shape(lambda: training.init_state(model, optimizer))
    arrays = (jax.ShapeDtypeStruct((batch, *a.shape), a.dtype) for a in (inputs, labels))
    return step, (state, *arrays)


def lm(
    strategy: Strategy,
    batch: int,
    *,
    length: int = 1024,
    queries: int = 1024,
    dtype: DTypeLike = jnp.bfloat16,
) -> Step:
    """Returns the step of a byte-level language model: 6 blocks, 768 features.

    Args:
        strategy: What is applied to the model.
        batch: Sequences in a batch.
        length: Tokens of a sequence.
        queries: Queries that attend at once.
        dtype: Dtype of the computation; parameters are float32.
    """
    tokens = jax.ShapeDtypeStruct((length,), jnp.int32)
    shape = Shape(queries=queries)

    def make() -> nnx.Module:
        return LM(256, length, shape, dtype=dtype, rngs=nnx.Rngs(0))

    return step_of(make, tokens, tokens, strategy, batch)


def scanned_lm(strategy: Strategy, batch: int, *, dtype: DTypeLike = jnp.bfloat16) -> Step:
    """Returns the step of the same model under `scan`; `remat` is applied to the loop's body."""
    if strategy.block_codec is not None:
        raise ValueError(f"strategy={strategy.spec!r}: expected none that encodes blocks' inputs")
    if strategy.first_blocks is not None:
        raise ValueError(f"strategy={strategy.spec!r}: expected one that treats all blocks alike")
    tokens = jax.ShapeDtypeStruct((1024,), jnp.int32)

    def around(body: Body) -> Body:
        return nnx.remat(body, policy=strategy.remat_policy) if strategy.remat else body

    def make() -> nnx.Module:
        return ScannedLM(256, 1024, around=around, dtype=dtype, rngs=nnx.Rngs(0))

    of_model = dataclasses.replace(strategy, remat=False)
    return step_of(make, tokens, tokens, of_model, batch, unroll=False)
