# %% [markdown]
# # Is my gradient still right?
#
# A compressed step computes the same loss, bit for bit. Its gradient has noise, as that of a smaller batch
# has. This tutorial measures the noise and looks for a bias, on real images.

# %%
import matplotlib.pyplot as plt
import optax
from flax import nnx

import jaxcomp as jc
from experiments.data.datasets import load

# %% [markdown]
# ## A model and a batch
#
# A small convolutional network of stock Flax NNX layers, and 256 images of Fashion-MNIST, which this
# repository holds.


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


data = load("fashion_mnist_embedded")
batch = next(data.batches("train", 256, seed=0, epoch=0, augment=False, drop_remainder=True))

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
