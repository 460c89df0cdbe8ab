"""A norm and an activation function of smooth pieces with one code."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp import SignAware
from jaxcomp.ops._curves import CURVES
from jaxcomp.ops._norm import Norm
from jaxcomp.ops._norm_curve import Normalization, norm_curve
from tests.helpers import assert_close, assert_same_bits, normal

NORM = Norm((0, 1, 2), (0, 1, 2), 1e-5, use_fast_variance=False)
X, SCALE, BIAS = normal((8, 6, 6, 4)), 1 + normal((4,), seed=1), normal((4,), seed=2)


class OfBatch(Normalization):
    axes, epsilon = NORM.axes, NORM.epsilon
    count = X.size // SCALE.size

    def statistics(self, x):
        return NORM.statistics(x)

    def result(self, x, mean, variance, *parameters):
        return NORM.normalize(x, mean, variance, *parameters)

    def affine(self, mean, variance, *parameters):
        scale, bias = map(NORM.wide, parameters)
        return scale, bias

    def wide(self, statistic):
        return NORM.wide(statistic)

    def means(self, sums):
        return tuple(s / self.count for s in sums)

    def shares(self, cotangents, x):
        return tuple(map(NORM.wide, cotangents))


def run(x, scale=SCALE, bias=BIAS):
    codec, seed = SignAware(bits=4), jnp.uint32(0)
    return norm_curve(OfBatch(), x, (scale, bias), CURVES[0], jax.nn.silu, codec, seed)


def stock(x, scale=SCALE, bias=BIAS):
    return jax.nn.silu(NORM.normalize(x, *NORM.statistics(x), scale, bias))


def test_results_codes_and_scale_are_those_of_the_norm_and_the_function():
    y, x, mean, variance = jax.jit(run)(X)
    assert_same_bits(y.value, jax.jit(stock)(X))
    np.testing.assert_allclose(mean, X.mean((0, 1, 2)), atol=1e-6)
    np.testing.assert_allclose(variance, X.var((0, 1, 2)), rtol=1e-5)
    np.testing.assert_allclose(y.channel_scale.ravel(), np.hypot(SCALE, BIAS), rtol=1e-6)
    for coded, exact in ((y, y.value), (x, X)):
        error = np.abs(coded.codec.decode(coded.code) - exact).max()
        assert 0.05 < error < 0.5


def test_the_gradient_is_that_of_the_norm_and_the_function():
    weight = normal(X.shape, seed=3)

    def loss(function, *arguments):
        result = function(*arguments)
        return ((result if function is stock else result[0].value) * weight).sum()

    found, expected = (
        jax.jit(jax.grad(lambda *a, f=f: loss(f, *a), (0, 1, 2)))(X, SCALE, BIAS)
        for f in (run, stock)
    )
    for one, other in zip(found, expected, strict=True):
        assert 0 < np.linalg.norm(one - other) < 0.1 * np.linalg.norm(other)


def test_a_nan_of_a_statistic_is_in_the_scale():
    y, *_ = jax.jit(run)(X.at[0, 0, 0, 1].set(jnp.nan))
    assert np.isnan(y.channel_scale.ravel()).tolist() == [False, True, False, False]


def test_kernels_compute_the_same_gradients(launched_kernels):
    class OfMore(OfBatch):
        count = 4 * 16 * 16

    x, scale, bias = normal((4, 16, 16, 48)), 1 + normal((48,), seed=1), normal((48,), seed=2)
    weight = normal(x.shape, seed=3)

    def loss(codec, *arguments):
        x, *parameters = arguments
        silu = CURVES[0], jax.nn.silu
        y, *_ = norm_curve(OfMore(), x, tuple(parameters), *silu, codec, jnp.uint32(0))
        return (y.value * weight).sum()

    def found(codec):
        return jax.jit(jax.grad(lambda *a: loss(codec, *a), (0, 1, 2)))(x, scale, bias)

    expected = found(SignAware())
    assert not launched_kernels
    assert_close(found(SignAware(kernels=True)), expected, rtol=1e-5)
    assert len(launched_kernels) == 2
