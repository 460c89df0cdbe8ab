"""Convolutional networks with batch norms, and Equinox's without."""

import jax
import jax.numpy as jnp

from tests.zoo.losses import LABELS, cross_entropy, images
from tests.zoo.networks import of_function


def linen_resnet():
    from jax_resnet import ResNet, ResNetBlock

    model = ResNet(ResNetBlock, stage_sizes=(1, 1), hidden_sizes=(16, 32), n_classes=5)
    variables = jax.jit(model.init)(jax.random.key(0), images())

    def loss(params, stats, x):
        logits, state = model.apply(
            {"params": params, "batch_stats": stats}, x, mutable=["batch_stats"]
        )
        return cross_entropy(logits, LABELS), state

    return of_function(loss, variables["params"], variables["batch_stats"], images())


def of_haiku(forward, *inputs):
    """`forward(*inputs)` builds Haiku modules and returns the logits."""
    import haiku

    model = haiku.transform_with_state(forward)
    params, state = jax.jit(model.init)(jax.random.key(0), *inputs)

    def loss(params, state, *inputs):
        logits, state = model.apply(params, state, jax.random.key(1), *inputs)
        return cross_entropy(logits, LABELS), state

    return of_function(loss, params, state, *inputs)


def haiku_resnet():
    import haiku

    def forward(x):
        return haiku.nets.ResNet((1, 1, 1, 1), 5, channels_per_group=(16, 16, 32, 32))(x, True)

    return of_haiku(forward, images())


def haiku_mobilenet():
    import haiku

    def forward(x):
        return haiku.nets.MobileNetV1((1, 2, 2), (16, 32, 32), num_classes=5)(x, True)

    return of_haiku(forward, images())


def equinox_network(model, size=32):
    """An Equinox image model of one image and a key, mapped over the batch."""
    import equinox

    params, static = equinox.partition(model, equinox.is_inexact_array)

    def loss(params, x, keys):
        logits = jax.vmap(equinox.combine(params, static))(x, keys)
        return cross_entropy(logits, LABELS), ()

    x = jnp.moveaxis(images(size), 3, 1)
    return of_function(loss, params, x, jax.random.split(jax.random.key(1), len(x)))


def equinox_convnext():
    from equimo.models.convnext import ConvNeXt

    return equinox_network(
        ConvNeXt(depths=[1, 1], dims=[16, 32], num_classes=5, key=jax.random.key(0))
    )
