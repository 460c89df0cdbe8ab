"""A convolution of a concatenation reads the codes of its parts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxcomp as jc
from tests.helpers import AS_WRITTEN, error_of_mean, slow

SHAPE = (4, 32, 32, 8)
RECIPE = "automatic"


def conv(x, kernel):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)


def norm(x, axes):
    mean, var = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    return (x - mean) * lax.rsqrt(var + 1e-5)


def batch_norm_relu(x):
    return jax.nn.relu(norm(x, (0, 1, 2)))


def instance_norm_silu(x):
    return jax.nn.silu(norm(x, (1, 2)))


def gated(x):
    y = batch_norm_relu(x)
    return y * jax.nn.sigmoid(y.mean((1, 2), keepdims=True))


def network(before, params, x):
    first, second, last = params
    skip = before(conv(x, first))
    rest = conv(skip, second)
    return conv(jnp.concatenate([rest, skip, before(rest)], axis=-1), last)


@pytest.mark.parametrize("before", [batch_norm_relu, instance_norm_silu, slow(gated)])
def test_parts_keep_their_codes(before):
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = (3, 8), (8, 8), (24, 4)
    params = [jax.random.normal(k, (3, 3, *n)) / 5 for k, n in zip(keys, sizes, strict=False)]
    x = jax.random.normal(keys[3], (*SHAPE[:3], 3))
    stock = functools.partial(network, before)

    def loss(fn, params):
        return (fn(params, x) ** 2).sum()

    @jax.jit
    def draws(params):
        def one(seed):
            coded = jc.checkpoint(stock, RECIPE, seed=seed)
            return jax.grad(functools.partial(loss, coded))(params)

        return lax.map(one, jnp.arange(30))

    plan = jc.plan(jc.checkpoint(stock, RECIPE), params, x)
    (joined,) = [value for value in plan.values if value.op == "concatenation"]
    # What the convolution reads is 24 channels, of which 8 have no code of their own.
    assert joined.saved_bytes < 1.1 * np.prod(SHAPE) / 2
    assert plan.saved_bytes < 3.5 * np.prod(SHAPE) / 2
    same, expected = (
        jax.jit(f, compiler_options=AS_WRITTEN)(params)
        for f in (
            lambda params: jax.vjp(lambda p: jc.checkpoint(stock, RECIPE)(p, x), params)[0],
            lambda params: stock(params, x),
        )
    )
    np.testing.assert_array_equal(expected, same)
    gradient = jax.jit(jax.grad(functools.partial(loss, stock)))(params)
    for one, found in zip(gradient, draws(params), strict=True):
        error, chance = error_of_mean(list(found), one)
        assert 0 < error < 2 * chance + 1e-3 * np.linalg.norm(one)


@pytest.mark.parametrize(
    "other",
    [
        lambda skip, rest: jnp.concatenate([rest, skip], axis=1)[:, :32],  # not of channels
        lambda skip, rest: jnp.concatenate([rest, rest], axis=-1),  # without a code
        lambda skip, rest: jnp.concatenate([skip, skip], axis=-1),  # twice the same
    ],
)
def test_other_concatenations_are_left(other):
    def f(x, kernel, last):
        skip = instance_norm_silu(x)
        y = other(skip, conv(skip, kernel))
        return (conv(y, last[:, :, : y.shape[-1]]) ** 2).sum()

    keys = jax.random.split(jax.random.key(0), 3)
    shapes = SHAPE, (3, 3, 8, 8), (3, 3, 16, 4)
    arguments = [jax.random.normal(k, shape) for k, shape in zip(keys, shapes, strict=True)]
    as_default = jc.plan(jc.checkpoint(f, "automatic"), *arguments)
    assert "concatenation" not in {value.op for value in as_default.values}
    coded = jc.checkpoint(f, "automatic:bits=8")
    found, expected = (jax.jit(jax.grad(g, 2))(*arguments) for g in (coded, f))
    assert np.linalg.norm(found - expected) < 0.02 * np.linalg.norm(expected)


def test_a_code_with_features_of_another_axis_is_not_read():
    """A norm over other axes has encoded a part, whose axes are all of one size."""

    def f(x, kernels):
        other = norm(x, (2, 3))
        part = instance_norm_silu(conv(x, kernels[0]))
        result = conv(jnp.concatenate([x, part], axis=-1), kernels[1])
        return (result**2).sum() + jax.nn.silu(other).sum()

    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (16, 16, 16, 16))
    kernels = [jax.random.normal(k, (3, 3, 16 * n, 16)) / 12 for n, k in enumerate(keys[1:], 1)]
    coded = jc.checkpoint(f, "automatic:bits=4")
    found = [value.op for value in jc.plan(coded, x, kernels).values]
    assert found.count("norm_act") and "concatenation" in found
    found, expected = (jax.jit(jax.grad(g, (0, 1)))(x, kernels) for g in (coded, f))
    # The kernel of the concatenation; the noise of 4 bits is 0.04.
    error = np.linalg.norm(found[1][1] - expected[1][1])
    assert 0 < error < 0.1 * np.linalg.norm(expected[1][1])
