# %% [markdown]
# # Is my gradient still right?
#
# A compressed step computes the same loss, bit for bit. Its gradient has noise, as that of a smaller batch
# has. This tutorial measures the noise and looks for a bias.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
from flax import nnx

import jaxcomp as jc

# %% [markdown]
# ## A model and a batch
#
# A small convolutional network of stock Flax NNX layers, and 256 images of stripes. The class of an image is
# the direction of its stripes; their width, their place and the noise are random.


# %%
def make_model(policy=None):
    rngs = nnx.Rngs(0)
    layers = []
    for inputs, width in ((1, 16), (16, 32), (32, 64)):
        layers += [
            nnx.Conv(inputs, width, (3, 3), strides=2, use_bias=False, rngs=rngs),
            nnx.BatchNorm(width, rngs=rngs),
            nnx.relu,
        ]
    model = nnx.Sequential(*layers, lambda x: x.mean((1, 2)), nnx.Linear(64, 10, rngs=rngs))
    return model if policy is None else jc.compress(model, policy)


def loss(model, batch):
    images, labels = batch
    return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()


def stripes(key, count):
    keys = jax.random.split(key, 4)
    labels = jax.random.randint(keys[0], (count,), 0, 10)
    angles = jnp.pi / 10 * labels[:, None, None]
    y, x = jnp.mgrid[:28, :28]
    width, place = (jax.random.uniform(k, (count, 1, 1), minval=0.5) for k in keys[1:3])
    waves = jnp.sin(width * (x * jnp.cos(angles) + y * jnp.sin(angles)) + 2 * jnp.pi * place)
    return (waves + 0.3 * jax.random.normal(keys[3], waves.shape))[..., None], labels


batch = stripes(jax.random.key(0), 256)

# %% [markdown]
# ## The loss is the same
#
# The forward pass of a compressed model has the same bits.

# %%
exact, coded = (nnx.jit(loss)(model, batch) for model in (make_model(), make_model("automatic")))
print(exact, coded)
assert exact == coded

# %% [markdown]
# ## The gradient has noise
#
# `jc.check_gradients` takes the compressed gradient 16 times with different rounding noise. It also takes exact
# gradients: as the reference, as a control (the row `Exact()`), and to measure the noise of SGD.

# %%
report = jc.check_gradients(loss, make_model("automatic"), batch)
print(report)

# %% [markdown]
# - `/ SGD` is the noise of the codes over the noise that the choice of the images causes. At 0.1, the variance
#   of the gradient grows by 1%.
# - `bias` estimates the norm of the mean error. An interval that starts at 0 means that no bias was found.
# - `floor` is the mean error that noise alone leaves after 16 draws.
#
# ## How many bits?

# %%
bits = (3, 4, 8)
noise = {
    name: [
        jc.check_gradients(loss, make_model(f"{name}:bits={b}"), batch).noise_over_sgd for b in bits
    ]
    for name in ("quantize", "automatic")
}
for name, values in noise.items():
    print(name, [f"{value:.3f}" for value in values])

# %%
figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
for (name, values), color, marker in zip(
    noise.items(), ("#E69F00", "#0072B2"), ("o", "s"), strict=True
):
    axes.plot(bits, values, color=color, marker=marker, label=name)
axes.axhline(1, color="black", linestyle="--", label="as much as SGD's own")
axes.set(xlabel="bits per element", ylabel="noise / noise of SGD", yscale="log", xticks=bits)
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# Each additional bit roughly halves the noise. Where the ratio is far below 1, the codes add little to the noise
# of SGD.
# [Check the gradient](../howto/check-gradients.md) describes each number, and what to do about a bias.
