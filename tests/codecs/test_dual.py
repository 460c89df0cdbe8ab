import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp import DualPrecision, Quantize
from tests.helpers import (
    DTYPES,
    as_float,
    assert_unbiased,
    collectives,
    normal,
    shard,
    without_type_checks,
)

SHAPES = st.lists(st.integers(0, 11), max_size=5).map(tuple)


def round_trip(codec, x, seed=None):
    return codec.decode(codec.encode(x, seed))


@hypothesis.settings(max_examples=12)
@hypothesis.given(SHAPES, st.sampled_from(DTYPES), st.integers(1, 9), st.integers(0, 100))
def test_error_is_below_a_step_of_the_rest(shape, dtype, window, seed):
    codec = DualPrecision(window, bits=8)
    x = normal(shape, dtype, seed) + 3
    decoded = jax.jit(lambda x: round_trip(codec, x))(x)
    assert (decoded.shape, decoded.dtype) == (x.shape, x.dtype)
    spread = 2 * np.ptp(as_float(x)) if x.size else 0.0
    limit = spread / 255 + 4 * float(jnp.finfo(dtype).eps) * np.max(np.abs(as_float(x)), initial=0)
    assert np.max(np.abs(as_float(decoded) - as_float(x)), initial=0) <= limit


@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_below_a_step_up_to_the_largest_number(dtype):
    most = float(jnp.finfo(dtype).max)
    signs = np.random.default_rng(0).uniform(-1, 1, (2, 9, 9, 3))
    x = jnp.asarray((most * np.append(signs, np.sign(signs), axis=0)).astype(dtype))
    error = as_float(round_trip(DualPrecision(4, bits=8), x)) / most - as_float(x) / most
    assert np.max(np.abs(error)) <= 4 / 255


@hypothesis.settings(max_examples=12)
@hypothesis.given(SHAPES, st.sampled_from(DTYPES), st.integers(1, 9), st.sampled_from((1, 2, 4)))
def test_bytes_are_those_of_means_and_rest(shape, dtype, window, bits):
    features = shape if len(shape) > 2 else (*((1, 1, *shape)[-2:]), 1)
    window_of_map = max(1, min(window, *features[1:-1]))
    windows = math.prod(-(-n // window_of_map) for n in features[1:-1])
    means = 2 * features[0] * windows * features[-1]
    nbytes = DualPrecision(window, bits).nbytes(shape, dtype)
    assert nbytes == means + Quantize(bits).nbytes(shape, dtype)


@pytest.mark.parametrize("shape", [(2, 7, 9, 3), (3, 20), (2, 14, 4)])
def test_unbiased(shape):
    x = normal(shape)
    draw = jax.jit(jax.vmap(lambda seed: round_trip(DualPrecision(4, 2), x, seed)))
    draws = np.asarray(draw(jnp.arange(2048)))
    at_random = (draws != draws[0]).any(0)  # a group's extremes come back exactly
    np.testing.assert_allclose(draws[0][~at_random], np.asarray(x)[~at_random], rtol=1e-5)
    assert_unbiased(draws[:, at_random], np.asarray(x)[at_random])


def test_rest_is_taken_from_the_windows_of_a_map_that_they_do_not_divide():
    """Where the map is constant in each window, the means are all there is."""
    rows = jnp.repeat(jnp.array([1.0, 2.0]), jnp.array([8, 6]), total_repeat_length=14)
    x = (rows[:, None] * rows[None])[None, :, :, None]
    np.testing.assert_array_equal(round_trip(DualPrecision(8, 1), x), x)


def test_windows_along_the_features():
    x = jnp.repeat(normal((2, 5, 3)), 4, axis=-1)  # constant along each 4 features of a token
    codec = DualPrecision(4, 1, along="features")
    np.testing.assert_array_equal(round_trip(codec, jnp.round(x)), jnp.round(x))
    assert np.any(np.asarray(round_trip(DualPrecision(4, 1), jnp.round(x))) != jnp.round(x))
    tokens = Quantize(1).nbytes(x.shape, x.dtype)
    assert codec.nbytes(x.shape, x.dtype) == 2 * 2 * 5 * 3 + tokens


def test_other_axes_are_an_error():
    with without_type_checks(), pytest.raises(ValueError, match="along='rows': expected one of"):
        DualPrecision(along="rows")


def test_less_noise_than_quantization_alone_of_a_smooth_map():
    ramp = jnp.linspace(0, 10, 56)
    x = (ramp[:, None] + ramp[None])[None, :, :, None] + 0.1 * normal((1, 56, 56, 1))

    def error(codec):
        return float(jnp.mean((round_trip(codec, x) - x) ** 2))

    assert error(DualPrecision(8, 2)) < 0.2 * error(Quantize(2))


def test_a_nan_stays_in_its_channel_and_sample():
    x = normal((2, 9, 9, 2)).at[0, 4, 4, 0].set(jnp.nan)
    decoded = np.asarray(round_trip(DualPrecision(), x))
    assert np.isnan(decoded[0, :, :, 0]).all()
    assert np.isfinite(decoded[1]).all()
    assert np.isfinite(decoded[..., 1]).all()


def test_sharded_it_needs_no_communication():
    x = normal((8, 14, 14, 4))
    fn = jax.jit(lambda x: round_trip(DualPrecision(), x))
    np.testing.assert_array_equal(fn(shard(x)), fn(x))
    assert collectives(fn, shard(x)) == set()


@pytest.mark.parametrize(("window", "bits"), [(0, 2), (True, 2), (8, 7), (2.0, 2)])
def test_bad_input(window, bits):
    with pytest.raises(Exception, match=r"window|bits"):
        DualPrecision(window, bits)
