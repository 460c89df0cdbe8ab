"""A batch norm and an activation function of smooth pieces with one code."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp import SignAware
from jaxcomp.ops._curves import CURVES
from jaxcomp.ops._norm import Norm
from jaxcomp.ops._norm_act_vjp import Input
from jaxcomp.ops._norm_curve import norm_curve
from tests.helpers import assert_same_bits, normal

NORM = Norm((0, 1, 2), (0, 1, 2), 1e-5, use_fast_variance=False)
X, SCALE, BIAS = normal((8, 6, 6, 4)), 1 + normal((4,), seed=1), normal((4,), seed=2)


def run(x, variance=None):
    given = Input(x, SCALE, BIAS)
    return norm_curve(NORM, given, CURVES[0], jax.nn.silu, SignAware(bits=4), jnp.uint32(0))


def test_result_code_and_scale_are_those_of_the_norm_and_the_function():
    y, mean, variance = jax.jit(run)(X)
    expected = jax.jit(lambda x: jax.nn.silu(NORM.normalize(x, *NORM.statistics(x), SCALE, BIAS)))
    assert_same_bits(y.value, expected(X))
    np.testing.assert_allclose(mean, X.mean((0, 1, 2)), atol=1e-6)
    np.testing.assert_allclose(variance, X.var((0, 1, 2)), rtol=1e-5)
    np.testing.assert_allclose(y.channel_scale.ravel(), np.hypot(SCALE, BIAS), rtol=1e-6)
    assert np.abs(y.codec.decode(y.code) - y.value).max() < 0.5
    assert np.abs(y.codec.decode(y.code) - y.value).max() > 0.05


def test_a_nan_of_a_statistic_is_in_the_scale():
    y, *_ = jax.jit(run)(X.at[0, 0, 0, 1].set(jnp.nan))
    assert np.isnan(y.channel_scale.ravel()).tolist() == [False, True, False, False]
