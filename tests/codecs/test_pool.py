import itertools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp import AvgPool, Exact, Quantize
from tests.helpers import (
    DTYPES,
    as_float,
    assert_close,
    assert_unbiased,
    normal,
    without_type_checks,
)


def pooled(x, window):
    """Each value replaced by its window's mean, window by window in float64."""
    out = np.empty_like(x)
    corners = itertools.product(*(range(0, n, window) for n in x.shape[1:-1]))
    for corner in corners:
        index = (slice(None), *(slice(c, c + window) for c in corner))
        axes = tuple(range(1, x.ndim - 1))
        out[index] = x[index].mean(axes, keepdims=True)
    return out


SPATIAL = st.integers(1, 5).flatmap(
    lambda window: st.tuples(
        st.just(window), st.lists(st.integers(window, 11), min_size=1, max_size=3).map(tuple)
    )
)


@hypothesis.settings(max_examples=10)
@hypothesis.given(SPATIAL, st.sampled_from(DTYPES), st.integers(0, 100))
def test_window_means(window_and_map, dtype, seed):
    window, spatial = window_and_map
    x = normal((2, *spatial, 3), dtype, seed)
    codec = AvgPool(window)
    decoded = jax.jit(lambda x: codec.decode(codec.encode(x)))(x)
    assert (decoded.shape, decoded.dtype) == (x.shape, x.dtype)
    half_ulp = float(jnp.finfo(dtype).eps) / 2
    assert_close(decoded, pooled(as_float(x), window), half_ulp + 1e-6)


@hypothesis.settings(max_examples=20)
@hypothesis.given(SPATIAL, st.sampled_from(DTYPES), st.integers(0, 3), st.integers(0, 3))
def test_bytes(window_and_map, dtype, batch, channels):
    window, spatial = window_and_map
    windows = math.prod(math.ceil(n / window) for n in spatial)
    nbytes = AvgPool(window).nbytes((batch, *spatial, channels), dtype)
    assert nbytes == batch * windows * channels * jnp.dtype(dtype).itemsize


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5])
def test_pooling_twice_is_pooling_once(window):
    codec = AvgPool(window)
    round_trip = jax.jit(lambda x: codec.decode(codec.encode(x)))
    once = round_trip(normal((2, 7, 8, 3)))
    assert_close(round_trip(once), once, 1e-6)


def test_window_of_one_is_exact():
    x = normal((2, 5, 4, 3), jnp.bfloat16)
    np.testing.assert_array_equal(AvgPool(1).decode(AvgPool(1).encode(x)), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [2, 3])
def test_the_largest_floats_do_not_overflow(dtype, window):
    x = jnp.full((1, 7, 7, 1), jnp.finfo(dtype).max, dtype)
    codec = AvgPool(window)
    assert_close(codec.decode(codec.encode(x)), x, 2e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_stays_so_within_its_window(bad):
    x = np.array(normal((2, 5, 5, 2)))
    x[1, 2, 3, 1] = bad
    codec = AvgPool(2)
    decoded = np.asarray(codec.decode(codec.encode(jnp.asarray(x))))
    expected = np.zeros(x.shape, bool)
    expected[1, 2:4, 2:4, 1] = True
    np.testing.assert_array_equal(~np.isfinite(decoded), expected)


@pytest.mark.parametrize("window", [0, -1, True, 2.0])
def test_window_other_than_a_positive_integer_is_an_error(window):
    message = f"window={window}: expected a positive integer"
    with without_type_checks(), pytest.raises(ValueError, match=message):
        AvgPool(window)


@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (2, 5, 3, 4), (2, 0, 8, 4), (2, 3, 4)])
def test_window_larger_than_the_map_is_an_error(shape):
    with pytest.raises(ValueError, match="window=4 is larger than the map"):
        AvgPool(4).encode(jnp.ones(shape))


@pytest.mark.parametrize("shape", [(), (3,), (3, 4)])
def test_no_spatial_axis_is_an_error(shape):
    with pytest.raises(ValueError, match=r"needs shape \(batch, spatial..., channels\)"):
        AvgPool(2).encode(jnp.ones(shape))


@pytest.mark.parametrize(
    ("window", "shape"), [(2, (2, 6, 6, 3)), (4, (2, 9, 10, 2)), (3, (2, 7, 4))]
)
def test_with_deviations_it_is_unbiased(window, shape):
    codec, x = AvgPool(window, Quantize(4)), normal(shape)
    assert codec.unbiased
    assert not AvgPool(window).unbiased
    draw = jax.jit(jax.vmap(lambda seed: codec.decode(codec.encode(x, seed))))
    decoded = draw(jnp.arange(8000, dtype=jnp.uint32))
    at_random = decoded.std(0) > 1e-3  # not in a window of one element
    assert_unbiased(decoded[:, at_random], x[at_random])


@pytest.mark.parametrize("window", [2, 3])
def test_one_element_of_each_window_decodes_to_itself_and_others_to_the_mean(window):
    x = normal((2, 7, 8, 3))
    codec, mean = AvgPool(window, Exact()), AvgPool(window)
    decoded, means = (c.decode(c.encode(x, 5)) for c in (codec, mean))
    sums = mean.sums(decoded != means)
    assert ((sums == 1) | (mean.sums(x == means) > 0)).all()
    sizes = mean.sums(jnp.ones_like(x))
    there = (decoded != means).astype(jnp.float32)
    np.testing.assert_allclose(
        mean.sums(decoded - means), sizes * mean.sums(there * (x - means)), atol=1e-5
    )


def test_a_deviation_is_a_codec():
    with without_type_checks(), pytest.raises(TypeError, match=r"deviation=4: expected a codec"):
        AvgPool(2, deviation=4)
