import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp.codecs import _dithered
from tests.helpers import normal


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_error_is_uniform_over_one_step_and_does_not_depend_on_the_value(bits):
    h = normal((5, 7, 3))

    @jax.jit
    @jax.vmap
    def draw(seed):
        code = _dithered.encode(h, bits, seed)
        decoded, step = _dithered.decode(code, bits, h.shape)
        return (decoded - h) / step

    draws = 4096
    error = np.asarray(draw(jnp.arange(draws)))
    assert np.abs(error).max() < 0.5 + 1e-4
    # Mean 0 and variance 1/12 of each element; their deviations are those of a uniform variable.
    assert np.abs(error.mean(0)).max() < 4.5 * (1 / 12 / draws) ** 0.5
    assert np.abs((error**2).mean(0) - 1 / 12).max() < 4.5 * (1 / 180 / draws) ** 0.5


def test_a_constant_channel_comes_back():
    """A constant channel is normalised to 0."""
    h = jnp.concatenate([normal((2, 32, 7)), jnp.zeros((2, 32, 1))], axis=-1)
    decoded, step = _dithered.decode(_dithered.encode(h, 4, 0), 4, h.shape)
    np.testing.assert_array_equal(step[..., 7], 0)
    np.testing.assert_array_equal(decoded[..., 7], 0)


@pytest.mark.parametrize("shape", [(8, 16, 8, 16), (8, 7, 3)])
def test_a_channel_with_a_nan_decodes_to_nan(shape):
    """XLA for CPUs computes the extremes of large arrays by a library that drops NaNs."""
    h = normal(shape).at[1, 2, ..., 2].set(jnp.nan)
    decoded, _ = jax.jit(lambda h: _dithered.decode(_dithered.encode(h, 4, 0), 4, shape))(h)
    expected = np.zeros(shape, bool)
    expected[1, ..., 2] = True
    np.testing.assert_array_equal(np.isnan(decoded), expected)
