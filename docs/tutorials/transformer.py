# %% [markdown]
# # A transformer on a 12 GB card
#
# What does a training step of a language model need on a GeForce RTX 3060 with 12 GB? This tutorial compiles
# the step of a stock Flax NNX decoder by exact and by compressed strategies. The card need not be attached
# (`pip install ".[gpu-aot]"`).

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
from flax import nnx

import jaxcomp as jc

CARD = "rtx3060-12gb"
WIDTH, HEADS, DEPTH, TOKENS, LENGTH = 768, 12, 6, 16_384, 1024

# %% [markdown]
# ## The model
#
# A decoder as one writes it with Flax: layer norm, attention, layer norm, MLP.


# %%
class Block(nnx.Module):
    def __init__(self, rngs):
        options = {"dtype": jnp.bfloat16, "rngs": rngs}
        self.norm1 = nnx.LayerNorm(WIDTH, **options)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, **options)
        self.norm2 = nnx.LayerNorm(WIDTH, **options)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, **options)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, **options)

    def __call__(self, x):
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.tokens = nnx.Embed(TOKENS, WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.blocks = nnx.List(Block(rngs) for _ in range(DEPTH))
        self.norm = nnx.LayerNorm(WIDTH, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.tokens.attend(self.norm(x))


def loss(model, tokens):
    logits = model(tokens[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def make_step(transform, batch):
    model = transform(nnx.eval_shape(lambda: Decoder(nnx.Rngs(0))))
    optimizer = nnx.eval_shape(lambda: nnx.Optimizer(model, optax.adamw(3e-4), wrt=nnx.Param))

    @nnx.jit
    def step(model, optimizer, tokens):
        graphdef, params = nnx.split(model)

        def add(total, part):
            gradient = jax.grad(lambda params: loss(nnx.merge(graphdef, params), part))(params)
            return jax.tree.map(jnp.add, total, gradient), None

        parts = tokens.reshape(transform.micro_batches, -1, LENGTH + 1)
        zeros = jax.tree.map(jnp.zeros_like, params)
        gradient, _ = jax.lax.scan(add, zeros, parts)
        optimizer.update(model, jax.tree.map(lambda g: g / len(parts), gradient))

    return step, (model, optimizer, jax.ShapeDtypeStruct((batch, LENGTH + 1), jnp.int32))


# %% [markdown]
# ## Exact and compressed strategies
#
# - `remat` recomputes each block in the backward pass.
# - `accumulate:4` adds up the gradients of four parts of the batch; the step does that itself, above.
# - `automatic` is what `jc.compress(model)` does.
# - `accumulate:4:automatic` does both.

# %%
BATCH = 12
strategies = ["plain", "remat", "accumulate:4", "automatic", "accumulate:4:automatic"]
table = jc.compare(make_step, strategies, batch=BATCH, target=CARD, xla_remat=False)
table

# %% [markdown]
# `remat`, `accumulate:4` and `automatic` each need about a third of plain's memory. Accumulation costs the
# least time: it is the first thing to try where no layer, such as a batch norm, uses statistics of the whole batch. Codes
# do not recompute the forward pass, and also help where the batch is one long sequence. Both together need
# the least.
#
# ## The picture

# %%
figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
base = table.rows[0].report.estimated_seconds
for row, color in zip(
    table.rows, ("#000000", "#E69F00", "#56B4E9", "#0072B2", "#009E73"), strict=True
):
    if row.report is None:
        continue
    x, y = row.report.total_bytes / 2**30, row.report.estimated_seconds / base
    axes.scatter(x, y, color=color, s=60)
    axes.annotate(row.name, (x, y), (7, 5), textcoords="offset points")
axes.axvline(12, color="#D55E00", linestyle="--")
axes.annotate("all bytes of the card", (12, 1), (-130, -14), textcoords="offset points")
axes.set(xlabel="memory that the step needs, GiB", ylabel="estimated time / plain", xlim=(0, None))
axes.margins(0.15)
plt.show()

# %% [markdown]
# The estimate adds the times of memory traffic and arithmetic at the card's peak rates. It ranks strategies; it is
# no measured step time.
# [Compress a transformer](../howto/transformers.md) has the policies one by one.
