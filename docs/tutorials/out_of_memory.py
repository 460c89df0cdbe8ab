# %% [markdown]
# # Out of memory: from the message to a step that fits
#
# A training step that does not fit ends like this:
#
# ```text
# RESOURCE_EXHAUSTED: Out of memory while trying to allocate 13.99GiB.
# ```
#
# This tutorial goes from the message to a step that fits. The card is a GeForce RTX 3060 with 12 GB. It
# need not be attached: XLA compiles for it on any machine (`pip install ".[gpu-aot]"`).

# %%
import functools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
from flax import nnx

import jaxcomp as jc

CARD = "rtx3060-12gb"

# %% [markdown]
# ## The model
#
# A residual network of stock Flax NNX layers. It does not use jaxcomp.


# %%
class Block(nnx.Module):
    def __init__(self, width, stride, rngs):
        conv = functools.partial(nnx.Conv, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        norm = functools.partial(nnx.BatchNorm, dtype=jnp.bfloat16, rngs=rngs)
        inputs = width // stride
        self.conv1, self.norm1 = conv(inputs, width, (3, 3), stride), norm(width)
        self.conv2, self.norm2 = conv(width, width, (3, 3)), norm(width)
        self.shortcut = conv(inputs, width, (1, 1), stride) if stride > 1 else None

    def __call__(self, x):
        y = nnx.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return nnx.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nnx.Module):
    def __init__(self, rngs):
        self.stem = nnx.Conv(3, 64, (7, 7), 2, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        strides = [(64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1)]
        self.blocks = nnx.List(Block(width, stride, rngs) for width, stride in strides)
        self.head = nnx.Linear(256, 1000, rngs=rngs)

    def __call__(self, x):
        x = nnx.max_pool(self.stem(x), (3, 3), (2, 2), "SAME")
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2), dtype=jnp.float32))


def loss(model, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()


# %% [markdown]
# ## A step factory
#
# jaxcomp compiles the same step several times. `make_step(transform, batch)` applies `transform` to the model
# and returns the step and its abstract arguments. `nnx.eval_shape` makes a model without arrays.


# %%
def make_step(transform, batch):
    model = transform(nnx.eval_shape(lambda: ResNet(nnx.Rngs(0))))
    optimizer = nnx.eval_shape(lambda: nnx.Optimizer(model, optax.sgd(0.1, 0.9), wrt=nnx.Param))

    @nnx.jit
    def step(model, optimizer, images, labels):
        value, gradient = nnx.value_and_grad(loss)(model, images, labels)
        optimizer.update(model, gradient)
        return value

    images = jax.ShapeDtypeStruct((batch, 224, 224, 3), jnp.bfloat16)
    return step, (model, optimizer, images, jax.ShapeDtypeStruct((batch,), jnp.int32))


# %% [markdown]
# ## What the step needs, and when
#
# `jc.compare` compiles the step as it is, with its blocks recomputed (`jax.checkpoint`), and compressed.
# "temp" is XLA's own figure of temporary memory.

# %%
BATCH = 1536
table = jc.compare(
    make_step,
    ["plain", "remat", "automatic"],
    batch=BATCH,
    target=CARD,
    timelines=True,
    xla_remat=False,
)
table

# %% [markdown]
# The timeline names the largest buffers at the peak: the layer, the pass that makes them, the source line.

# %%
timelines = {row.name: row.timeline for row in table.rows}
print(timelines["plain"].table(8))

# %% [markdown]
# They are results of convolutions and norms that the backward pass reads. If the largest buffers were
# parameters or logits, compressing activations would not help.
#
# ## Let jaxcomp choose
#
# `jc.fit` takes the bytes that the step may use. It compiles exact strategies and compressed ones, and
# returns the one with the least estimated time among those that fit.

# %%
plan = jc.fit(make_step, batch=BATCH, budget="8GiB", target=CARD)
print(plan)
assert plan.total_bytes <= 8 * 2**30

# %% [markdown]
# If `plan.policy` is not None, `jc.compress(model, plan.policy)` applies the plan to the model of your training
# program. Otherwise `plan.spec` names an exact strategy, such as `remat`. This step does not split its batch,
# so `fit` uses no micro-batches. `jc.compress(model)` alone applies the default policy.
#
# ## Before and after

# %%
figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
for (name, live), color in zip(timelines.items(), ("#000000", "#E69F00", "#0072B2"), strict=True):
    progress = [100 * i / len(live.live_bytes) for i in range(len(live.live_bytes))]
    axes.plot(progress, [b / 2**30 for b in live.live_bytes], color=color, label=name)
axes.axhline(12, color="#D55E00", linestyle="--", label="all bytes of the card")
axes.set(xlabel="instructions of the step, %", ylabel="live bytes, GiB", ylim=(0, None))
axes.legend(frameon=False)
plt.show()
