"""A coded array times a factor of each channel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp import SignAware, ops
from jaxcomp.ops._gate import gate
from tests.helpers import normal


def test_a_product_has_the_code_of_its_operand():
    x = jax.nn.relu(normal((2, 4, 4, 8)))
    factor, dy = normal((2, 1, 1, 8), seed=1), normal((2, 4, 4, 8), seed=2)
    coded = ops.encode_activation(x, jnp.full((1, 1, 1, 8), 2.0), SignAware(bits=4))
    decoded = coded.codec.decode(coded.code)

    made = gate(coded, factor)
    np.testing.assert_array_equal(made.value, x * factor)
    np.testing.assert_allclose(made.codec.decode(made.code), decoded * factor, rtol=1e-6)
    np.testing.assert_allclose(
        made.channel_scale, 2 * jnp.abs(factor).max(0, keepdims=True), rtol=1e-6
    )
    dfactor = jax.grad(lambda factor: (gate(coded, factor).value * dy).sum())(factor)
    expected = (dy * decoded).sum((1, 2), keepdims=True)
    np.testing.assert_allclose(dfactor, expected, rtol=1e-5, atol=1e-5)


def test_a_nan_in_a_factor_is_in_the_scale():
    """XLA for CPUs computes the maxima of large arrays by a library that drops NaNs."""
    x, factor = jnp.ones((64, 2, 2, 128)), normal((64, 1, 1, 128)).at[5, 0, 0, 7].set(jnp.nan)
    coded = ops.encode_activation(x, jnp.ones((1, 1, 1, 128)), SignAware(bits=4))
    scale = jax.jit(lambda factor: gate(coded, factor).channel_scale)(factor)
    assert np.flatnonzero(np.isnan(scale)).tolist() == [7]


def test_an_array_without_a_code_is_an_error():
    coded = ops.CodedArray(normal((2, 4, 4, 8)), jnp.ones((1, 1, 1, 8)), None, SignAware(bits=4))
    with pytest.raises(ValueError, match="x: expected an array with a code"):
        gate(coded, normal((2, 1, 1, 8)))
