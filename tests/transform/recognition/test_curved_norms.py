"""Norms of any groups of elements, and the activation function after them, have one code."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax

import jaxcomp as jc
from tests.helpers import AS_WRITTEN, error_of_mean, normal

FEATURES = 16
SHAPE = (4, 16, 16, FEATURES)


def of_nnx(module, x, scale, bias):
    module = module(rngs=nnx.Rngs(0))
    module.scale[...], module.bias[...] = scale, bias
    return module(x)


def of_linen(x, scale, bias):
    return linen.GroupNorm(4).apply({"params": {"scale": scale, "bias": bias}}, x)


def of_equinox(x, scale, bias):
    """With the channels first."""
    norm = eqx.nn.GroupNorm(4, FEATURES)
    norm = eqx.tree_at(lambda n: (n.weight, n.bias), norm, (scale, bias))
    return jax.vmap(norm)(x)


def by_hand(x, scale, bias, *, deviation_of=(1, 2, 4), ddof=0):
    """As Haiku: the array is normalised in groups, by a quotient."""
    groups = x.reshape(*SHAPE[:3], 4, FEATURES // 4)
    mean = groups.mean((1, 2, 4), keepdims=True)
    var = groups.var(deviation_of, keepdims=True, ddof=ddof)
    y = ((groups - mean) / jnp.sqrt(var + 1e-5)).reshape(SHAPE)
    return y * scale[None, None, None] + bias[None, None, None]


def adaptive(x, scale, bias):
    """With another scale and offset of each sample, as in diffusion models."""
    of_sample = jnp.stack([scale, 2 * scale, scale + bias, scale])[:, None, None]
    y = by_hand(x, scale, bias)
    return y * (1 + of_sample) + 0.1 * of_sample


def as_keras(x, scale, bias, axes=(0, 1, 2)):
    """The mean is subtracted from the bias."""
    mean, var = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    factor = lax.rsqrt(var + 1e-5) * scale[None, None, None]
    return x * factor + (-mean * factor + bias[None, None, None])


def in_groups(x, scale, bias, deviation_of=(1, 2, 4)):
    """As Keras: the mean is subtracted from the bias, and all of it is done in groups."""
    groups = x.reshape(*SHAPE[:3], 4, FEATURES // 4)
    mean, var = groups.mean((1, 2, 4), keepdims=True), groups.var(deviation_of, keepdims=True)
    factor = lax.rsqrt(var + 1e-5) * scale.reshape(1, 1, 1, 4, -1)
    return (groups * factor + (-mean * factor + bias.reshape(1, 1, 1, 4, -1))).reshape(SHAPE)


def adaptive_in_groups(x, scale, bias):
    """With another scale and offset of each group of each sample."""
    groups = x.reshape(4, 256, 4, FEATURES // 4)
    mean, var = groups.mean((1, 3), keepdims=True), groups.var((1, 3), keepdims=True)
    y = (groups - mean) / jnp.sqrt(var + 1e-5) * scale.reshape(1, 1, 4, -1)
    y += bias.reshape(1, 1, 4, -1)
    of_groups = jnp.stack([scale, bias, scale + bias, scale])[:, None, :4, None]
    return (y / (1 + of_groups**2) + of_groups).reshape(SHAPE)


group_norm = functools.partial(of_nnx, functools.partial(nnx.GroupNorm, FEATURES, 4))
in_bfloat16 = functools.partial(
    of_nnx, functools.partial(nnx.GroupNorm, FEATURES, 4, dtype="bfloat16")
)
instance_norm = functools.partial(of_nnx, functools.partial(nnx.InstanceNorm, FEATURES))


def network(norm, act, params, x):
    first, scale, bias, last = params
    order = "NCHW" if norm is of_equinox else "NHWC"
    y = act(norm(conv(x, first, "NHWC", order), scale, bias))
    return conv(y, last, order, "NHWC")


def conv(x, kernel, before, after):
    numbers = (before, "HWIO", after)
    return lax.conv_general_dilated(
        x, kernel.astype(x.dtype), (1, 1), "SAME", dimension_numbers=numbers
    )


def make_params():
    keys = jax.random.split(jax.random.key(0), 4)
    scale = 1.5 + 0.3 * jax.random.normal(keys[1], FEATURES)
    return [
        jax.random.normal(keys[0], (3, 3, 3, FEATURES)) / 5,
        scale,
        0.3 * jax.random.normal(keys[2], FEATURES),
        jax.random.normal(keys[3], (1, 1, FEATURES, 8)) / 4,
    ]


@pytest.mark.parametrize(
    ("norm", "act", "bits"),
    [
        (group_norm, jax.nn.silu, 4),
        (in_bfloat16, jax.nn.gelu, 4),
        (instance_norm, functools.partial(jax.nn.leaky_relu, negative_slope=0.2), 5),
        (of_linen, jax.nn.elu, 5),
        (of_equinox, jax.nn.relu, 5),
        (by_hand, jax.nn.leaky_relu, 5),
        (adaptive, jax.nn.silu, 4),
        (as_keras, jax.nn.silu, 4),
        (functools.partial(as_keras, axes=(1, 2)), jax.nn.silu, 4),
        (in_groups, jax.nn.silu, 4),
        (adaptive_in_groups, jax.nn.gelu, 4),
    ],
)
def test_one_code_for_norm_and_activation(norm, act, bits):
    params = make_params()
    dtype = jnp.bfloat16 if norm is in_bfloat16 else jnp.float32
    x = jax.random.normal(jax.random.key(1), (*SHAPE[:3], 3), dtype)
    target = jax.random.normal(jax.random.key(2), (*SHAPE[:3], 8))
    stock = functools.partial(network, norm, act)

    def loss(fn, params, x=x):
        return ((fn(params, x) - target) ** 2).sum().astype(jnp.float32)

    @jax.jit
    def draws(params):
        def one(seed):
            coded = jc.checkpoint(stock, "automatic", seed=seed)
            return jax.grad(functools.partial(loss, coded))(params)

        return lax.map(one, jnp.arange(30))

    plan = jc.plan(jc.checkpoint(stock, "automatic"), params, x)
    (unit,) = [value for value in plan.values if value.op == "norm_act"]
    assert unit.saved_bytes < 1.05 * np.prod(SHAPE) * bits / 8 + 4096
    assert plan.saved_bytes < unit.saved_bytes + 4096
    same, expected = (
        jax.jit(f, compiler_options=AS_WRITTEN)(params)
        for f in (
            lambda params: jax.vjp(lambda p: jc.checkpoint(stock, "automatic")(p, x), params)[0],
            lambda params: stock(params, x),
        )
    )
    np.testing.assert_array_equal(expected, same)
    gradient = jax.jit(jax.grad(functools.partial(loss, stock)))(params)
    for one, found in zip(gradient, draws(params), strict=True):
        error, chance = error_of_mean(list(found), one)
        rounding = 0.05 if dtype == jnp.bfloat16 else 1e-3
        assert error < 2 * chance + rounding * np.linalg.norm(one)
        assert chance > 0


def test_statistics_that_are_read_have_their_gradients():
    def f(x, scale):
        mean, var = x.mean((1, 2), keepdims=True), x.var((1, 2), keepdims=True)
        y = jax.nn.silu((x - mean) * lax.rsqrt(var + 1e-5) * scale[None, None, None])
        return y.sum() / 100 + (mean**2).sum() + jnp.sqrt(var).sum()

    x = 1 + jax.random.normal(jax.random.key(1), SHAPE)
    scale = jnp.full(FEATURES, 0.1)
    coded = jc.checkpoint(f, "automatic:bits=4")
    assert "norm_act" in {value.op for value in jc.plan(coded, x, scale).values}
    found, expected = (jax.jit(jax.grad(g))(x, scale) for g in (coded, f))
    assert np.linalg.norm(found - expected) < 0.08 * np.linalg.norm(expected)


def other_groups(x, scale, bias):
    mean = x.mean((1, 2), keepdims=True)
    var = x.reshape(4, 16, 16, 4, 4).var((1, 2, 4))
    of_channels = jnp.repeat(var, 4, axis=-1)[:, None, None]
    return (x - mean) * lax.rsqrt(of_channels + 1e-5) * scale[None, None, None]


def of_other_channels(x, scale, bias):
    """Samples and channels are as many: the statistics of one are used for the other."""
    x = x[:, :, :, :4]
    mean, var = x.mean((1, 2)), x.var((1, 2))
    wide = var.reshape(4, 4)[None, None].reshape(1, 1, 4, 4)
    return (x.reshape(16, 16, 4, 4) - mean[None, None]) * lax.rsqrt(wide + 1e-5)


def of_rows(x, scale, bias):
    """Statistics differ along an axis of the image, along which a code has one range."""
    mean, var = x.mean(2, keepdims=True), x.var(2, keepdims=True)
    return (x - mean) * lax.rsqrt(var + 1e-5) * scale[None, None, None]


@pytest.mark.parametrize(
    "other",
    [
        other_groups,
        of_other_channels,
        functools.partial(by_hand, ddof=1),
        functools.partial(by_hand, deviation_of=(1, 2)),
        functools.partial(in_groups, deviation_of=(1, 2, 3)),
        lambda x, scale, bias: (x - x.mean((1, 2), keepdims=True)) * scale[None, None, None],
        lambda x, scale, bias: by_hand(x, scale, bias) * x,
        of_rows,
    ],
)
def test_what_is_no_norm_is_not_taken_for_one(other):
    x = jax.random.normal(jax.random.key(1), SHAPE)
    scale, bias = jnp.full(FEATURES, 2.0), jnp.full(FEATURES, 0.5)

    def f(x, scale, bias):
        return jax.nn.silu(other(x, scale, bias)).sum()

    as_default = jc.plan(jc.checkpoint(f, "automatic"), x, scale, bias)
    assert "norm_act" not in {value.op for value in as_default.values}
    coded = jc.checkpoint(f, "automatic:bits=8")
    found, expected = (jax.jit(jax.grad(g))(x, scale, bias) for g in (coded, f))
    assert np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)


def test_a_nan_is_seen():
    x = jax.random.normal(jax.random.key(1), SHAPE).at[0, 0, 0, 0].set(jnp.nan)
    scale, bias = jnp.ones(FEATURES), jnp.zeros(FEATURES)

    def f(scale, bias, x):
        return jax.nn.silu(group_norm(x, scale, bias)).sum()

    found, expected = (
        jax.jit(jax.grad(g, (0, 1, 2)))(scale, bias, x) for g in (jc.checkpoint(f, "automatic"), f)
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.isnan(one), np.isnan(other))


def test_a_convolution_beside_the_norm_reads_its_code():
    """As the skip connection of a residual block that begins with a norm."""

    def f(params, x):
        first, scale, bias, last = params
        x = conv(x, first, "NHWC", "NHWC")
        return conv(x, last, "NHWC", "NHWC") + conv(
            jax.nn.silu(group_norm(x, scale, bias)), 2 * last, "NHWC", "NHWC"
        )

    def loss(fn, params):
        return (fn(params, x) ** 2).sum()

    @jax.jit
    def draws(params):
        def one(seed):
            return jax.grad(functools.partial(loss, jc.checkpoint(f, "automatic", seed=seed)))(
                params
            )

        return lax.map(one, jnp.arange(30))

    params = make_params()
    x = jax.random.normal(jax.random.key(1), (*SHAPE[:3], 3))
    plan = jc.plan(jc.checkpoint(f, "automatic"), params, x)
    assert plan.saved_bytes < 1.05 * np.prod(SHAPE) / 2 + 4096
    gradient = jax.jit(jax.grad(functools.partial(loss, f)))(params)
    for one, found in zip(gradient, draws(params), strict=True):
        error, chance = error_of_mean(list(found), one)
        assert 0 < error < 2 * chance + 1e-3 * np.linalg.norm(one)


def test_standardized_kernels_have_no_code():
    """The backward pass has them from the parameters."""

    def standardized(kernel):
        kernel = kernel - kernel.mean((0, 1, 2), keepdims=True)
        return kernel * lax.rsqrt((kernel * kernel).mean((0, 1, 2), keepdims=True) + 1e-5)

    def convolution(x, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        kernel = standardized(kernel)
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)

    def function(x, kernels):
        for kernel in kernels:
            x = jax.nn.relu(convolution(x, kernel))
        return x

    x, kernels = normal((2, 8, 8, 48)), [normal((3, 3, 48, 48), seed=i) for i in range(2)]
    coded = jc.checkpoint(function, jc.recipes.automatic(), coded_argnums=0)
    values = jc.plan(coded, x, kernels).values
    assert not [v for v in values if v.decision != "exact" and kernels[0].size in v.shape]
    assert not [v for v in values if v.shape == kernels[0].shape]
