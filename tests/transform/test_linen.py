"""A Flax Linen model as its users write it, through `checkpoint`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen

import jaxcomp as jc
from jaxcomp.memory import declared_residual_bytes
from tests.helpers import assert_close, assert_same_bits, normal, slow


class Block(linen.Module):
    filters: int
    conv: Any
    norm: Any
    act: Callable
    strides: tuple[int, int] = (1, 1)

    @linen.compact
    def __call__(self, x):
        residual = x
        y = self.conv(self.filters, (3, 3), self.strides)(x)
        y = self.act(self.norm()(y))
        y = self.conv(self.filters, (3, 3))(y)
        y = self.norm(scale_init=linen.initializers.constant(0.5))(y)
        if residual.shape != y.shape:
            residual = self.conv(self.filters, (1, 1), self.strides, name="conv_proj")(residual)
            residual = self.norm(name="norm_proj")(residual)
        return self.act(residual + y)


class ResNet(linen.Module):
    """Of the shape of the network in Flax's ImageNet example."""

    stage_sizes: tuple[int, ...]
    num_classes: int
    num_filters: int = 8

    @linen.compact
    def __call__(self, x, train=True):
        conv = functools.partial(linen.Conv, use_bias=False)
        norm = functools.partial(linen.BatchNorm, use_running_average=not train, momentum=0.9)
        x = conv(self.num_filters, (7, 7), (2, 2), padding=[(3, 3), (3, 3)], name="conv_init")(x)
        x = linen.relu(norm(name="bn_init")(x))
        x = linen.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for i, blocks in enumerate(self.stage_sizes):
            for j in range(blocks):
                strides = (2, 2) if i > 0 and j == 0 else (1, 1)
                filters = self.num_filters * 2**i
                x = Block(filters, strides=strides, conv=conv, norm=norm, act=linen.relu)(x)
        x = jnp.mean(x, axis=(1, 2))
        return jnp.asarray(linen.Dense(self.num_classes)(x), jnp.float32)


MODEL = ResNet(stage_sizes=(1, 1), num_classes=5)
IMAGES, LABELS = normal((8, 32, 32, 3)), jnp.arange(8) % 5
VARIABLES = jax.jit(MODEL.init)(jax.random.key(0), IMAGES)


def forward(params, batch_stats, images):
    variables = {"params": params, "batch_stats": batch_stats}
    logits, state = MODEL.apply(variables, images, train=True, mutable=["batch_stats"])
    return logits, jax.lax.stop_gradient(state)


def step(run):
    def loss(params):
        logits, state = run(params, VARIABLES["batch_stats"], IMAGES)
        return optax.softmax_cross_entropy_with_integer_labels(logits, LABELS).mean(), state

    return lambda params: jax.value_and_grad(loss, has_aux=True)(params)


@pytest.mark.parametrize(("policy", "error"), [slow(jc.Exact(), 1e-5), (jc.Quantize(8), 0.05)])
def test_the_step_is_that_of_the_model(policy, error):
    stock, ours = (
        jax.jit(step(run))(VARIABLES["params"]) for run in (forward, jc.checkpoint(forward, policy))
    )
    assert_close(ours[0], stock[0], 1e-6)
    for a, b in zip(*map(jax.tree.leaves, (ours[1], stock[1])), strict=True):
        assert jnp.linalg.norm(a - b) < error * jnp.linalg.norm(b)


def test_results_have_the_models_bits():
    ours = jax.jit(jc.checkpoint(forward, jc.Quantize(2)))
    arguments = VARIABLES["params"], VARIABLES["batch_stats"], IMAGES
    assert_same_bits(ours(*arguments), jax.jit(forward)(*arguments))


def test_it_stores_less():
    plain, ours = (
        declared_residual_bytes(step(run), VARIABLES["params"])
        for run in (forward, jc.checkpoint(forward, jc.Quantize(4)))
    )
    assert ours < 0.25 * plain
