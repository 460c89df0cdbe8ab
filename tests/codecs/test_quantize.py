import dataclasses
import functools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp import Quantize
from jaxcomp.codecs import Encoded
from jaxcomp.codecs import _quantize as quantize
from tests.helpers import DTYPES, as_float, assert_same_bits, normal, without_type_checks, z_limit

BITS = (1, 2, 3, 4, 5, 6, 8)
GROUPS = ("channel", "sample", "row")
SHAPES = st.lists(st.integers(0, 9), max_size=5).map(tuple)
ROUNDING = ("stochastic", "nearest")


def group_axes(group, shape):
    """The axes of a group, spelled out for each rank; a channel has 16 values or more."""
    rank = len(shape)
    if group == "channel" and rank > 2 and math.prod(shape[1:-1]) < 16:
        group = "sample"
    return {
        "channel": [(), (0,), (1,), (1,), (1, 2), (1, 2, 3)],
        "sample": [(), (0,), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
        "row": [(), (0,), (1,), (2,), (3,), (4,)],
    }[group][rank]


def packed_bytes(shape, bits):
    """Bytes of the codes: single bits and pairs share along the last axis."""
    *outer, last = shape or (1,)
    if bits == 1:
        return math.prod(outer) * math.ceil(last / 8)
    if bits == 2:
        return math.ceil(math.prod(outer) * math.ceil(last / 2) / 2)
    if bits == 3:
        return packed_bytes(shape, 2) + packed_bytes(shape, 1)
    if bits == 5:
        fours = math.prod(outer) * math.ceil(last / 4)  # single bits in elements of four
        return packed_bytes(shape, 4) + math.ceil(fours / 2)
    if bits == 6:
        return packed_bytes(shape, 4) + packed_bytes(shape, 2)
    return math.ceil(math.prod(shape) * bits / 8)


@functools.partial(jax.jit, static_argnums=0)
def decode_unrounded(codec, encoded):
    """The decoded value before it is rounded to the array's dtype."""
    return codec.decode(dataclasses.replace(encoded, dtype=jnp.dtype("float32")))


@functools.partial(jax.jit, static_argnums=0)
def round_trip(codec, x):
    return codec.decode(codec.encode(x))


@hypothesis.settings(max_examples=20)
@hypothesis.given(SHAPES, st.sampled_from(BITS), st.sampled_from(GROUPS), st.sampled_from(DTYPES))
def test_bytes(shape, bits, group, dtype):
    groups = math.prod(1 if axis in group_axes(group, shape) else n for axis, n in enumerate(shape))
    expected = packed_bytes(shape, bits) + 2 * groups * jnp.dtype(dtype).itemsize
    assert Quantize(bits, group).nbytes(shape, dtype) == expected


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", [(3, 5, 7, 9), (4, 16, 16, 8)])
def test_bytes_are_those_of_the_compiled_program(bits, shape):
    codec = Quantize(bits)
    compiled = jax.jit(codec.encode).lower(jnp.ones(shape)).compile()
    encoded = jax.eval_shape(codec.encode, jnp.ones(shape))
    pointers = 8 * len(encoded.arrays)  # the program returns a tuple
    nbytes = compiled.memory_analysis().output_size_in_bytes - pointers
    assert codec.nbytes(shape, jnp.float32) == encoded.nbytes == nbytes


@hypothesis.settings(max_examples=10)
@hypothesis.given(
    SHAPES,
    st.sampled_from(BITS),
    st.sampled_from(GROUPS),
    st.sampled_from(ROUNDING),
    st.sampled_from(DTYPES),
    st.integers(0, 2**32 - 1),
)
def test_error_bound_and_exact_extremes(shape, bits, group, rounding, dtype, seed):
    x = normal(shape, dtype, seed)
    codec = Quantize(bits, group, rounding)

    @jax.jit
    def run(x):
        encoded = codec.encode(x)
        return codec.decode(encoded), decode_unrounded(codec, encoded)

    decoded, got = run(x)
    assert (decoded.shape, decoded.dtype) == (x.shape, x.dtype)
    if x.size == 0:
        return
    axes = group_axes(group, x.shape)
    value, got = as_float(x), as_float(got)
    low, high = value.min(axes, keepdims=True), value.max(axes, keepdims=True)
    step = (high - low) / (2**bits - 1)
    slack = 1e-6 * (np.abs(low) + np.abs(high))
    bound = step / 2 if rounding == "nearest" else step
    assert np.all(np.abs(got - value) <= bound + slack)
    # On the levels, and rounded to the dtype once.
    level = (got - low) / np.where(step == 0, 1, step)
    assert np.all(np.abs(level - np.round(level)) * step <= slack)
    half_ulp = float(jnp.finfo(dtype).eps) / 2
    assert np.all(np.abs(as_float(decoded) - got) <= half_ulp * np.abs(got) + slack)
    for extreme in (low, high):
        at = value == extreme
        np.testing.assert_array_equal(as_float(decoded)[at], value[at])


@hypothesis.settings(max_examples=10)
@hypothesis.given(SHAPES, st.sampled_from(BITS), st.sampled_from(GROUPS), st.sampled_from(DTYPES))
def test_error_bound_and_bytes_of_dither(shape, bits, group, dtype):
    x = normal(shape, dtype)
    codec = Quantize(bits, group, "dither")
    encoded = jax.jit(codec.encode)(x)
    assert encoded.nbytes == codec.nbytes(x.shape, x.dtype)
    if x.size == 0:
        return
    axes, value = group_axes(group, x.shape), as_float(x)
    low, high = value.min(axes, keepdims=True), value.max(axes, keepdims=True)
    step = (high - low) / (2**bits - 1)
    error = np.abs(as_float(decode_unrounded(codec, encoded)) - value)
    assert np.all(error <= step / 2 + 1e-6 * (np.abs(low) + np.abs(high)))


@pytest.mark.parametrize("bits", BITS)
def test_dither_is_unbiased_and_its_error_uniform(bits):
    """Whatever the value is, exact levels too; and two neighbours have errors of their own."""
    draws, codec = 4096, Quantize(bits, "sample", "dither")
    x = jnp.asarray(np.random.default_rng(bits).uniform(-0.7, 1.9, (2, 48)), jnp.float32)
    step = np.ptp(as_float(x), 1, keepdims=True) / (2**bits - 1)
    decoded = jax.jit(jax.vmap(lambda s: decode_unrounded(codec, codec.encode(x, s))))(
        jnp.arange(draws)
    )
    error = (as_float(decoded) - as_float(x)) / step
    deviation = (draws * 12) ** -0.5
    floor = 2.0**-17 + 1e-6 * 2**bits  # the grid of the noise, and float32's own rounding
    assert np.all(np.abs(error.mean(0)) < z_limit(x.size) * deviation + floor)
    np.testing.assert_allclose(error.var(0), 1 / 12, rtol=0.12)
    covariance = (error[..., 1:] * error[..., :-1]).mean(0)
    assert np.all(np.abs(covariance) < z_limit(covariance.size) * draws**-0.5 / 12 + floor)


def test_a_constant_group_is_exact_with_dither_and_a_nan_stays():
    x = jnp.full((2, 20, 4), 0.3).at[1, 3, 2].set(jnp.nan)
    codec = Quantize(2, "channel", "dither")
    decoded = codec.decode(codec.encode(x))
    assert_same_bits(decoded, x.at[1, :, 2].set(jnp.nan))


@pytest.mark.parametrize("bits", BITS)
def test_unbiased_over_every_number_of_the_noise(bits, monkeypatch):
    """All 2^16 numbers, once each: the mean error is no more than half their distance."""
    draws, top = 2**16, 2**bits - 1
    row = np.random.default_rng(bits).uniform(0, top, 12).astype(np.float32)
    row[:4] = 0, top, top // 2, top - 1  # exact levels too
    words = np.arange(draws, dtype=np.uint32)[:, None] << 16
    monkeypatch.setattr(quantize.noise, "words", lambda x, seed: jnp.asarray(words))
    x = jnp.broadcast_to(row, (draws, 12)) + jnp.zeros((draws, 1))
    codec = Quantize(bits, "row")
    decoded = np.asarray(jax.jit(lambda x: codec.decode(codec.encode(x)))(x), np.float64)
    np.testing.assert_allclose(decoded[:, :4], np.asarray(x[:, :4]), rtol=1e-6)
    bound = 2.0**-14 if bits == 8 else 1.25 * 2.0**-17
    assert np.all(np.abs(decoded.mean(0) - row) <= bound + 1e-6 * row)
    assert np.all(np.abs(decoded - row) < 1 + 1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
def test_unbiased_over_seeds(bits, dtype):
    draws, codec = 4096, Quantize(bits, "sample")
    x = jnp.asarray(np.random.default_rng(bits).uniform(-0.7, 1.9, (2, 48)), dtype)
    value = as_float(x)
    low, high = value.min(1, keepdims=True), value.max(1, keepdims=True)
    step = (high - low) / (2**bits - 1)
    up = (value - low) / step % 1  # the probability of the upper level
    seeds = jnp.arange(draws)
    decoded = jax.jit(jax.vmap(lambda s: decode_unrounded(codec, codec.encode(x, s))))(seeds)
    error = (np.asarray(decoded, np.float64) - value).mean(0) / step
    normal_enough = np.abs(up - 0.5) < 0.45  # at least 200 draws expected of either level
    assert normal_enough.sum() > 60
    std = np.sqrt(up * (1 - up) / draws)[normal_enough]
    floor = 2.0**-17 + 1e-6 * 2**bits  # the grid of the noise, and float32's own rounding
    assert np.all(np.abs(error[normal_enough]) < z_limit(std.size) * std + floor)
    # All elements together, 8 times as sharp.
    assert abs(error[normal_enough].sum()) < z_limit(1) * np.linalg.norm(std) + std.size * floor
    # Not a lucky middle: the draws vary as those of two levels do.
    variance = (np.asarray(decoded, np.float64) / step).var(0)
    np.testing.assert_allclose(variance[normal_enough], draws * std**2, rtol=0.4)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_unbiased_without_a_seed_over_values(bits, dtype):
    """The values' own bits are noise enough: the mean error over many of them vanishes."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 2048)), dtype)
    value = as_float(x)
    codec = Quantize(bits)
    got = as_float(decode_unrounded(codec, jax.jit(codec.encode)(x)))
    step = (value.max(1, keepdims=True) - value.min(1, keepdims=True)) / (2**bits - 1)
    up = (value - value.min(1, keepdims=True)) / step % 1
    std = np.sqrt(up * (1 - up))
    error = (got - value) / step
    assert abs(error.sum()) < z_limit(2) * np.linalg.norm(std)
    assert abs((error * value).sum()) < z_limit(2) * np.linalg.norm(std * value)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("low", "high"), [(-0.129, 1.129), (0.0, 1.999), (-3e-3, 1e-4)])
def test_levels_between_known_numbers_need_no_rounding(bits, dtype, low, high):
    """The same rounding of one level in all arrays would be a bias."""
    x = jnp.full((1, 4), low, dtype)
    *_, least, most = Quantize(bits).encode_within(x, low, high, 0).arrays
    least, most = float(least.item()), float(most.item())
    assert least <= low < high <= most < least + 3 * (high - low)
    levels = least + (most - least) / (2**bits - 1) * np.arange(2**bits)
    np.testing.assert_array_equal(as_float(levels.astype(dtype)), levels)


def test_nearest_is_biased_and_says_so():
    assert not Quantize(2, rounding="nearest").unbiased
    assert Quantize(2, rounding="stochastic").unbiased


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [0.0, 0.1, -7.3, 3e38, 2.0**-126])
def test_constant_groups_are_exact(bits, group, value):
    x = jnp.full((2, 3, 4, 5), value)
    assert_same_bits(round_trip(Quantize(bits, group), x), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
def test_the_largest_floats_do_not_overflow(bits, dtype):
    top = float(jnp.finfo(dtype).max)
    x = jnp.asarray([[-top, -top / 2, 0, top / 3, top]], dtype)
    decoded = as_float(round_trip(Quantize(bits, rounding="nearest"), x))
    step = 2 * (top / (2**bits - 1))
    assert np.all(np.abs(decoded / top - as_float(x) / top) <= step / top / 2 + 0.01)
    np.testing.assert_array_equal(decoded[0, [0, -1]], as_float(x)[0, [0, -1]])


@pytest.mark.parametrize("bits", BITS)
def test_tiny_ranges_stay_finite_and_near(bits):
    x = jnp.asarray([[1e-39, 3e-38, 2e-38, 0.0]])
    decoded = as_float(round_trip(Quantize(bits), x))
    assert np.all(np.abs(decoded - np.asarray(x, np.float64)) <= 2.0**-114)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("bits", BITS)
def test_non_finite_stays_so_and_touches_no_other_group(bits, bad):
    x = np.array(normal((3, 4, 5, 6)))
    expected = as_float(round_trip(Quantize(bits), x))
    x[1, 2, 3, 4] = bad
    decoded = as_float(round_trip(Quantize(bits), x))
    group = np.zeros(x.shape, bool)
    group[1, :, :, 4] = True
    assert np.all(np.isnan(decoded[group]))
    np.testing.assert_array_equal(decoded[~group], expected[~group])


@pytest.mark.parametrize("group", GROUPS)
def test_groups_never_cross_samples(group):
    """The codes of a sample do not change with the others."""
    x = normal((4, 5, 6, 3))
    other = x.at[1:].multiply(100)
    codec = Quantize(4, group)
    assert_same_bits(round_trip(codec, x)[0], round_trip(codec, other)[0])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"bits": 7}, "bits=7: expected one of"),
        ({"bits": True}, "bits=True: expected one of"),
        ({"bits": 0}, "bits=0: expected one of"),
    ],
)
def test_bits_outside_the_list_are_an_error(kwargs, message):
    with pytest.raises(ValueError, match=message):
        Quantize(**kwargs)


@pytest.mark.parametrize("kwargs", [{"group": "image"}, {"rounding": "up"}])
def test_unknown_group_or_rounding_is_an_error(kwargs):
    ((name, value),) = kwargs.items()
    message = f"{name}='{value}': expected one of"
    with without_type_checks(), pytest.raises(ValueError, match=message):
        Quantize(2, **kwargs)


def test_encoded_is_of_small_unsigned_integers_and_two_extremes():
    for length, channels in ((16, 16), (15, 1)):  # a group is a channel, or all of a sample
        encoded = jax.jit(Quantize(3).encode)(jnp.ones((2, length, 16), jnp.bfloat16))
        assert isinstance(encoded, Encoded)
        assert [(a.shape, a.dtype.name) for a in encoded.arrays] == [
            ((2, length, 8), "uint4"),
            ((2, length, 2), "uint8"),
            ((2, 1, channels), "bfloat16"),
            ((2, 1, channels), "bfloat16"),
        ]
