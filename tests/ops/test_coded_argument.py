"""Activation functions and gated linear units with one code of each operand."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp import Offload, Quantize
from jaxcomp.ops import _curves
from jaxcomp.ops._coded_argument import coded_activation
from tests.helpers import assert_close, assert_same_bits, kept, normal, slow

SMOOTH = [c for c in _curves.CURVES if c.piece is None]
X, FACTOR = 1.5 * normal((2, 32, 3)), normal((2, 32, 3), seed=1)


def run(of, *operands, bits=4, seed=0):
    """The function's own operation, compressed."""
    return coded_activation(
        operands, of, functools.partial(_stock, of), Quantize(bits), jnp.uint32(seed)
    )


def _stock(of, x, *factors):
    y = of.function(x)
    return y * factors[0] if factors else y


@pytest.mark.parametrize(
    ("gated", "of", "dtype"),
    kept(
        itertools.product([False, True], SMOOTH, [jnp.float32, jnp.bfloat16, jnp.float16]),
        [
            *((gated, of, jnp.float32) for gated in (False, True) for of in SMOOTH),
            (False, SMOOTH[0], jnp.float16),
            (True, SMOOTH[0], jnp.bfloat16),
        ],
    ),
    ids=lambda c: c.function.__name__ if hasattr(c, "function") else None,
)
def test_result_is_the_stock_one_and_the_gradient_follows_from_the_code(of, gated, dtype):
    operands = [a.astype(dtype) for a in (X, FACTOR)[: 1 + gated]]
    y, pull = jax.vjp(lambda *operands: run(of, *operands).value, *operands)
    assert_same_bits(y, _stock(of, *operands))
    found = run(of, *operands)
    dy = normal(y.shape, dtype, seed=2)
    by_argument = found.codec.argument if gated else found.codec
    code = found.code.arrays[:1]
    slope, function = (by_argument.function(code, y.shape, order) for order in (1, 0))
    wide = dy.astype(jnp.float32)
    if gated:
        _, factor = found.codec.factors(found.code.arrays, y.shape, 0)
        expected = wide * (slope * factor), wide * function
        decoded = (function * factor).astype(dtype)
    else:
        expected, decoded = (wide * slope,), function.astype(dtype)
    assert_same_bits(pull(dy), tuple(d.astype(dtype) for d in expected))
    assert_close(found.codec.decode(found.code), decoded, rtol=2 * float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize(
    ("of", "bits", "outlier"),
    [
        *((of, 4, 2.0) for of in SMOOTH),
        *((SMOOTH[0], *case) for case in ((4, 50.0), (3, 2.0))),
        *(slow(of, *case) for of in SMOOTH[1:] for case in ((4, 50.0), (3, 2.0))),
    ],
    ids=lambda c: c.function.__name__ if hasattr(c, "function") else None,
)
def test_what_is_decoded_is_unbiased(of, bits, outlier):
    x = jnp.linspace(-3.5, 3.5, 64).at[-1].set(outlier).reshape(1, 64, 1)
    factor = normal((1, 64, 1)).at[0, 5].set(10.0)
    exact_slope = jax.jit(jax.vmap(jax.grad(of.function)))(x.ravel()).reshape(x.shape)

    @jax.jit
    @jax.vmap
    def draw(seed):
        y, pull = jax.vjp(lambda x, f: run(of, x, f, bits=bits, seed=seed).value, x, factor)
        found = run(of, x, factor, bits=bits, seed=seed)
        return found.codec.decode(found.code), *pull(jnp.ones_like(y))

    expected = of.function(x) * factor, exact_slope * factor, of.function(x)
    for draws, exact in zip(draw(jnp.arange(20_000)), expected, strict=True):
        error = np.asarray(draws.mean(0) - exact)
        deviation = np.asarray(draws.std(0)) / len(draws) ** 0.5
        # Beside chance: the next term of the series, at steps of up to 1.
        assert np.all(np.abs(error) < 4.5 * deviation + 4e-3 * np.maximum(1, np.abs(factor)))
        assert np.sqrt(np.mean(error**2)) < 1.5 * np.sqrt(np.mean(deviation**2)) + 3e-3


def test_an_outlier_leaves_other_values_precise():
    @jax.jit
    def error(x):
        found = run(SMOOTH[1], x)
        return jnp.abs(found.codec.decode(found.code) - found.value)[0, 1:].max()

    x = jnp.linspace(-3.5, 3.5, 64).reshape(1, 64, 1)
    assert error(x.at[0, 0].set(100.0)) < 4 * error(x)  # equidistant levels: 15 times


@pytest.mark.parametrize("of", SMOOTH, ids=lambda c: c.function.__name__)
def test_huge_values_have_gradients(of):
    x = jnp.array([1.0, 1e4, 1e13]).reshape(1, 3, 1)
    gradient = jax.jit(jax.grad(lambda x: run(of, x).value.sum()))(x)
    np.testing.assert_allclose(gradient[0, 1:], 1, atol=1e-3)


def test_bytes_are_those_of_a_packed_code_and_of_bfloat16_ranges():
    found = jax.eval_shape(lambda x, f: run(SMOOTH[0], x, f).code, X, FACTOR)
    words = 4 * sum(X.shape)
    assert found.nbytes == 2 * (X.size // 2 + 2 * 2 * 2 * 3 + words)


def test_nan_and_inf_stay_visible_in_their_group_alone():
    x = X.at[0, 3, 0].set(jnp.nan).at[1, 2, 1].set(jnp.inf).at[0, 0, 2].set(-jnp.inf)
    found = run(SMOOTH[1], x)
    decoded = np.isnan(found.codec.decode(found.code))
    expected = np.zeros(x.shape, bool)
    expected[0, :, 0] = expected[1, :, 1] = expected[0, :, 2] = True
    np.testing.assert_array_equal(decoded, expected)


@pytest.mark.parametrize("shape", [(3, 5), (1, 1, 1), (0, 4, 2), (2, 17, 3)])
def test_odd_shapes_and_constants(shape):
    step = jax.jit(jax.value_and_grad(lambda x: run(SMOOTH[1], x).value.sum()))
    slope = jax.jit(jax.vmap(jax.grad(SMOOTH[1].function)))
    for x in (normal(shape), jnp.full(shape, -20.0), jnp.zeros(shape)):
        value, gradient = step(x)
        assert np.isfinite(value) and np.all(np.isfinite(gradient))
        if x.size and np.ptp(x) == 0:
            exact = slope(x.ravel()).reshape(shape)
            np.testing.assert_allclose(gradient, exact, atol=5e-4)


def test_codes_may_wait_on_the_host():
    codec = Offload(Quantize(bits=4))

    def loss(x, codec):
        return coded_activation(
            [x], SMOOTH[0], SMOOTH[0].function, codec, jnp.uint32(0)
        ).value.sum()

    on_host, on_device = (
        jax.jit(jax.grad(functools.partial(loss, codec=c)))(X) for c in (codec, codec.codec)
    )
    assert_same_bits(on_host, on_device)
