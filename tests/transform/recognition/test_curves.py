"""A batch norm, an activation function and a gate of a stock model have one code."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxcomp as jc
from jaxcomp.ops._curves import quick_gelu
from tests.helpers import AS_WRITTEN, error_of_mean, slow

RANGE = jc.recipes.fused(bits=4, scale_source="range")
FUNCTIONS = [jax.nn.silu, jax.nn.hard_swish, jax.nn.relu6, quick_gelu]


def norm(x, scale, bias):
    wide = x.astype(jnp.float32)
    mean, var = wide.mean((0, 1, 2), keepdims=True), wide.var((0, 1, 2), keepdims=True)
    y = (wide - mean) * lax.rsqrt(var + 1e-5) * scale[None, None, None] + bias[None, None, None]
    return y.astype(x.dtype)


def conv(x, w, groups=1):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x,
        w.astype(x.dtype),
        (1, 1),
        "SAME",
        dimension_numbers=numbers,
        feature_group_count=groups,
    )


def network(act, params, x):
    """As the blocks of EfficientNet: 1x1, depthwise, squeeze-and-excite, 1x1."""
    p = iter(params)
    y = act(norm(conv(x, next(p)), next(p), next(p)))
    y = act(norm(conv(y, next(p), 16), next(p), next(p)))
    y = y * jax.nn.sigmoid(y.mean((1, 2), keepdims=True) @ next(p).astype(y.dtype))
    y = norm(conv(y, next(p)), next(p), next(p))
    return (y + x[..., :1]).mean((1, 2)) ** 2


def make_params():
    keys = iter(jax.random.split(jax.random.key(0), 20))

    def normal(*shape):
        return jax.random.normal(next(keys), shape)

    def affine(features):
        return 1.5 + 0.1 * normal(features), 0.3 * normal(features)

    return [
        *(normal(1, 1, 3, 16) / 2, *affine(16)),
        *(normal(3, 3, 1, 16) / 3, *affine(16)),
        *(normal(16, 16) / 2, normal(1, 1, 16, 8) / 4, *affine(8)),
    ]


@pytest.mark.parametrize(
    ("act", "dtype"),
    [
        (jax.nn.silu, jnp.float32),
        slow(jax.nn.silu, jnp.bfloat16),
        (jax.nn.hard_swish, jnp.bfloat16),
        slow(jax.nn.relu6, jnp.bfloat16),
        slow(quick_gelu, jnp.bfloat16),
        slow(jax.nn.relu, jnp.float32),
    ],
)
def test_one_code_for_norm_activation_and_gate(act, dtype):
    params, x = make_params(), jax.random.normal(jax.random.key(1), (16, 16, 16, 3), dtype)
    target = jax.random.normal(jax.random.key(2), (16, 8))
    stock = functools.partial(network, act)

    def loss(fn, params, x=x):
        return ((fn(params, x) - target) ** 2).sum().astype(jnp.float32)

    @jax.jit
    def coded(params, seed):
        return jax.grad(functools.partial(loss, jc.checkpoint(stock, RANGE, seed=seed)))(params)

    same, expected = (
        jax.jit(f, compiler_options=AS_WRITTEN)(params)
        for f in (
            lambda params: jax.vjp(lambda p: jc.checkpoint(stock, RANGE)(p, x), params)[0],
            lambda params: stock(params, x),
        )
    )
    np.testing.assert_array_equal(expected, same)
    # In bfloat16, JAX adds up the gradient of a gate in bfloat16, with an error of 18%.
    exact = functools.partial(loss, stock, x=x.astype(jnp.float32))
    gradient = jax.jit(jax.grad(exact))(params)
    draws = [coded(params, seed) for seed in range(30)]
    for i, one in enumerate(gradient):
        error, chance = error_of_mean([draw[i] for draw in draws], one)
        rounding = 0.1 if dtype == jnp.bfloat16 else 1e-3
        assert error < 2 * chance + rounding * np.linalg.norm(one)
    plan = jc.plan(jc.checkpoint(stock, RANGE), params, x)
    assert {"norm_act", "gate"} <= {value.op for value in plan.values}
    # One code of 4 bits, and 2 bits that tell the pieces of `hard_swish` and `relu6`.
    elements = x.size // 3 * (16 + 16 + 8)
    assert plan.saved_bytes < 1.2 * elements * (6 if act in FUNCTIONS[1:] else 4) / 8


def test_layers_have_noise_of_their_own():
    """Layers of equal shapes and parameters: equal noise would bias their product."""
    x = jax.random.normal(jax.random.key(1), (8, 8, 8, 8))
    one, zero = jnp.ones(8), jnp.zeros(8)

    def words(x):
        def f(x):
            y = jax.nn.silu(norm(x, one, zero))
            return jnp.sin(jax.nn.silu(norm(y, one, zero))).sum()

        _, backward = jax.jit(lambda x: jax.vjp(jc.checkpoint(f, "fused:bits=4"), x))(x)
        leaves = jax.tree.leaves(backward)
        return [a for a in leaves if a.dtype == jnp.uint32 and a.shape == (8, 1, 1, 1)]

    first, second = words(x)
    assert not jnp.array_equal(first, second)


@jax.custom_jvp
def relu6(x):
    return jnp.minimum(jnp.maximum(x, 0.0), 6.0)


relu6.defjvp(lambda primals, tangents: (relu6(*primals), 2 * tangents[0]))


@pytest.mark.parametrize(
    "other",
    [
        relu6,
        lambda z: z * jax.nn.sigmoid(1.1 * z),
        lambda z: z * jax.nn.relu6(z + 2.5) / 6,
        lambda z: z + jax.nn.silu(z),
        lambda z: jax.nn.sigmoid(z) + z * jax.nn.sigmoid(z),
        jnp.tanh,
    ],
)
def test_what_is_another_function_is_not_taken_for_one(other):
    x = jax.random.normal(jax.random.key(1), (8, 8, 8, 8))
    weight = jax.random.normal(jax.random.key(2), x.shape)
    scale, bias = jnp.full(8, 2.0), jnp.full(8, 0.5)

    def f(x, scale, bias):
        return (weight * other(norm(x, scale, bias))).sum()

    # With one code of the norm, what follows is exact: so is the gradient of the bias.
    found, expected = (
        jax.jit(jax.grad(g, 2))(x, scale, bias) for g in (jc.checkpoint(f, "fused:bits=4"), f)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_a_factor_that_varies_over_the_map_is_no_gate():
    x = jax.random.normal(jax.random.key(1), (8, 8, 8, 8))
    factor = jax.random.normal(jax.random.key(2), x.shape)
    one, zero = jnp.ones(8), jnp.zeros(8)

    def f(factor, x):
        return (jax.nn.relu(norm(x, one, zero)) * factor).sum()

    coded = jc.checkpoint(f, "fused:bits=4")
    found = jax.jit(jax.grad(coded, (0, 1)))(factor, x)
    np.testing.assert_allclose(found[0], jax.jit(jax.grad(f))(factor, x), rtol=1e-5)
    assert "gate" not in {value.op for value in jc.plan(coded, factor, x).values}
