import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp import Float8
from tests.helpers import (
    DTYPES,
    as_float,
    assert_same_bits,
    assert_unbiased,
    collectives,
    normal,
    shard,
    without_type_checks,
)

FORMATS = {"e4m3": (jnp.float8_e4m3fn, 3, -6, 448.0), "e5m2": (jnp.float8_e5m2, 2, -14, 57344.0)}
SHAPES = st.lists(st.integers(0, 70), min_size=1, max_size=3).map(tuple)


def _distance(x, codec):
    """The distance of two codes next to each value, in float64."""
    _, mantissa, least, most = FORMATS[codec.format]
    axis = x.ndim + codec.axis
    blocks = np.arange(x.shape[axis]) // 32
    largest = np.stack(
        [np.abs(x).take(np.flatnonzero(blocks == b), axis).max(axis) for b in blocks]
    )
    scale = np.moveaxis(2.0 ** np.ceil(np.log2(np.maximum(largest, 1e-30) / most)), 0, axis)
    scale = np.maximum(scale, 2.0**-120)
    exponent = np.floor(np.log2(np.maximum(np.abs(x) / scale, 2.0**least)))
    return scale * 2.0 ** (exponent - mantissa)


@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(
    SHAPES,
    st.sampled_from(sorted(FORMATS)),
    st.sampled_from(["stochastic", "nearest"]),
    st.sampled_from(DTYPES),
    st.integers(-12, 12),
    st.sampled_from([-1, -2]),
)
def test_error_and_bytes(shape, kind, rounding, dtype, exponent, axis):
    codec = Float8(kind, axis if len(shape) > 2 else -1, rounding)
    x = normal(shape, dtype) * jnp.asarray(2.0**exponent, dtype)

    @jax.jit
    def run(x):
        encoded = codec.encode(x, 7)
        return encoded, codec.decode(encoded)

    encoded, decoded = run(x)
    places = list(shape)
    places[codec.axis] = -(-places[codec.axis] // 32)
    assert encoded.nbytes == codec.nbytes(shape, dtype) == np.prod(shape) + np.prod(places)
    if not x.size:
        return
    exact = as_float(x).astype(np.float64)
    error = np.abs(as_float(decoded) - exact)
    rounded = np.abs(exact) * float(jnp.finfo(dtype).eps)  # of the result's dtype
    part = 1.0 if rounding == "stochastic" else 0.5
    assert np.all(error <= part * _distance(exact, codec) + rounded)


@pytest.mark.parametrize("kind", FORMATS)
def test_every_code_and_power_of_two_decodes_to_itself(kind):
    dtype, *_, most = FORMATS[kind]
    codes = jax.lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), dtype)
    values = codes.astype(jnp.float32)
    values = values[jnp.isfinite(values)]
    for power in (-60, 0, 60):
        x = values[:, None] * 2.0**power
        x = jnp.concatenate([x, jnp.full_like(x, most * 2.0**power)], 1)
        decoded = jax.jit(lambda x: Float8(kind).decode(Float8(kind).encode(x, 1)))(x)
        assert_same_bits(decoded, x)


@pytest.mark.parametrize("kind", FORMATS)
def test_unbiased(kind):
    x = normal((4, 40)) * jnp.exp2(jnp.linspace(-6.0, 6.0, 40))[None]
    codec = Float8(kind)
    draws = jax.jit(jax.vmap(lambda seed: codec.decode(codec.encode(x, seed))))(jnp.arange(4096))
    assert_unbiased(draws, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extremes_and_non_finite(dtype):
    most, least = (float(getattr(jnp.finfo(dtype), name)) for name in ("max", "tiny"))
    x = jnp.asarray([[most, -most, 1.0, 0.0], [np.nan, np.inf, -np.inf, 2.0], [least] * 4], dtype)
    for kind in FORMATS:
        decode = jax.jit(lambda x, kind=kind: Float8(kind).decode(Float8(kind).encode(x)))
        found = as_float(decode(x))
        assert np.isfinite(found[0]).all()
        np.testing.assert_allclose(found[0, :2], [most, -most], rtol=0.25)
        np.testing.assert_array_equal(np.isnan(found[1]), [True, True, True, False])
        assert found[1, 3] == 2.0
        np.testing.assert_allclose(found[2], least, rtol=0, atol=2.0**-120)


@pytest.mark.parametrize("axis", [-1, -2])
def test_eight_devices_encode_as_one_and_do_not_communicate(axis):
    codec, x = Float8(axis=axis), normal((16, 48, 64))
    encoded = jax.jit(codec.encode)(shard(x))
    assert_same_bits(encoded, jax.jit(codec.encode)(x))
    assert collectives(codec.encode, shard(x)) == set()
    assert collectives(codec.decode, encoded) == set()


def test_bad_options_are_errors():
    with without_type_checks():
        for given, message in (
            ({"format": "e3m4"}, "format='e3m4': expected one of"),
            ({"rounding": "up"}, "rounding='up': expected one of"),
            ({"axis": 0}, "axis=0: expected a negative number"),
        ):
            with pytest.raises(ValueError, match=message):
                Float8(**given)
        with pytest.raises(TypeError, match=r"axis=1\.5: expected an integer"):
            Float8(axis=1.5)
    for shape, codec in (((), Float8()), ((8, 4), Float8(axis=-2))):
        with pytest.raises(ValueError, match=r"no axis -. behind that of the samples"):
            codec.nbytes(shape, jnp.float32)


def test_bytes_are_a_byte_for_each_element_and_for_each_32():
    for last, scales in ((64, 2), (65, 3), (96, 3)):
        assert Float8().nbytes((4, last), jnp.float32) == 4 * (last + scales)
