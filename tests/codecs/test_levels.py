import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp.codecs import _sign_aware, noise
from jaxcomp.codecs._companding import EVEN
from jaxcomp.codecs._sign_aware import ScaleSource, SignAware
from tests.helpers import assert_unbiased, normal

CODECS = [
    SignAware(bits, signed, scale_source)
    for bits in (2, 3, 4)
    for signed in (False, True)
    for scale_source in typing.get_args(ScaleSource)
]
DRAWS = 4096


def as_double(x):
    return np.asarray(x, np.float64)


def values(levels):
    codes = jnp.arange(levels.negatives + len(levels.positive.multiples))
    return np.asarray(levels.decode(codes)[0])


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_levels_grow_from_zero_to_the_top(codec):
    levels = codec.levels
    positive = values(levels)[levels.negatives :]
    assert len(values(levels)) == 2**codec.bits
    np.testing.assert_allclose(positive[[0, -1]], [0, levels.top], rtol=1e-6)
    gaps = np.diff(positive)
    np.testing.assert_allclose(gaps[0], levels.positive.unit, rtol=1e-6)
    assert (np.diff(gaps) >= -1e-6).all()


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_sign_is_exact_and_a_value_comes_back_as_a_neighbouring_level(codec):
    levels = codec.levels
    t = 4 * normal((4000,))
    decoded, positive = jax.jit(lambda t: levels.decode(levels.encode(t, t > 0, noise.words(t))))(t)
    np.testing.assert_array_equal(positive, t > 0)
    ladder = np.sort(values(levels))
    inside = np.clip(t, ladder[0], ladder[-1])
    below = ladder[np.searchsorted(ladder, inside, "right") - 1]
    above = ladder[np.minimum(np.searchsorted(ladder, inside, "left"), len(ladder) - 1)]
    on_its_side = positive | (levels.negatives > 1)
    assert ((decoded >= below) & (decoded <= above))[on_its_side].all()


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_rounding_is_unbiased_up_to_the_top(codec):
    levels = codec.levels
    ladder = np.sort(values(levels)[levels.negatives :])
    t = np.linspace(ladder[0], ladder[-1], 23)[1:-1].astype(np.float32)
    t = t[~np.isin(t, ladder)]
    if levels.negatives > 1:
        t = np.concatenate([t, np.linspace(levels.bottom, 0, 9)[1:-1].astype(np.float32)])

    @jax.vmap
    def draw(seed):
        x = jnp.asarray(t)
        return levels.decode(levels.encode(x, x > 0, noise.words(x, seed)))[0]

    assert_unbiased(jax.jit(draw)(jnp.arange(DRAWS)), t)


OCTAVES = [_sign_aware._PREACTIVATION[4], _sign_aware._ACTIVATION[4], _sign_aware._DEVIATION[4]]


@pytest.mark.parametrize("levels", OCTAVES, ids=str)
def test_positions_on_two_powers_of_two_are_those_on_one(levels):
    """A float's bits hold the index; where its power of two ends, distances of levels double."""
    even = dataclasses.replace(levels, floats=EVEN)
    assert len(levels._lines) == len(even._lines) - 1
    codes = jnp.arange(len(levels.multiples))
    for one in (levels, even):
        indices = codes + int(levels.first)
        found = one.multiple_of(indices + levels.first % 1)
        np.testing.assert_array_equal(found, np.asarray(levels.multiples, found.dtype))
        if levels.first % 1 == 0:
            np.testing.assert_array_equal(one.multiple(indices), found)
    x = jnp.concatenate(
        [jnp.linspace(0, levels.top, 2**20), jnp.asarray(levels.multiples) * levels.unit]
    )
    random = noise.indexed_words(x.shape, noise.folded(0, 0))
    one, other = (
        of.floats.rounded(of.floats.fixed(jnp.clip(of.position(x), *of.ends)), random)
        for of in (levels, even)
    )
    assert (one != other).mean() < 1e-4  # steps of the even index are 2^-16


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_multiples_are_integers_of_the_positive_levels(bits, signed):
    levels = SignAware(bits, signed=signed).levels
    codes = jnp.arange(2**bits)
    expected = [0] * levels.negatives + [int(m) for m in levels.positive.multiples]
    if all(m == int(m) for m in levels.positive.multiples):
        assert levels.multiples(codes).tolist() == expected


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_dither_keeps_the_mean_of_positive_values_and_takes_away_variance(codec):
    levels = codec.levels
    usual, all_of_them = (
        np.linspace(0, 2 * levels.positive.unit, 22),
        np.linspace(0, levels.top, 22),
    )
    t = np.concatenate([usual[1:], all_of_them[1:]], dtype=np.float32)[:, None]
    every = jnp.arange(2**16, dtype=jnp.uint32) << 16  # all numbers that rounding can take

    @jax.jit
    def draws(t):
        t, random = jnp.broadcast_arrays(t, every)
        decoded, _ = levels.decode(levels.encode(t, t > 0, random))
        return decoded, decoded - levels.dither(random)

    plain, dithered = map(as_double, draws(t))
    np.testing.assert_allclose(dithered.mean(1), t[:, 0], atol=1e-4 * levels.top)
    assert dithered[:21].var(1).mean() < 0.75 * plain[:21].var(1).mean()


def test_what_is_above_the_top_comes_back_as_the_top():
    levels = SignAware(4).levels
    t = jnp.array([levels.top, 2 * levels.top, jnp.inf])
    decoded = levels.decode(levels.encode(t, t > 0, noise.words(t)))[0]
    np.testing.assert_array_equal(decoded, np.float32(levels.top))


@pytest.mark.parametrize("scale_source", typing.get_args(ScaleSource))
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_normalized_values_are_unbiased_inside_their_span(bits, scale_source):
    codec = SignAware(bits, scale_source=scale_source)
    span = {2: 4.0, 3: 12.0, 4: 16.0}[bits]
    inside = np.array([*np.linspace(-3, 3, 15), -0.7 * span, 0.9 * span], np.float32) + 0.1
    h = jnp.concatenate([inside, jnp.array([-2.0 * span, 2 * span])])[None, :, None]

    def round_trip(seed):
        return codec.decode_normalized(codec.encode_normalized(h, noise.words(h, seed)), h.shape)

    draws = np.asarray(jax.jit(jax.vmap(round_trip))(jnp.arange(DRAWS)))[:, 0, :, 0]
    assert_unbiased(draws[:, :-2], inside)
    if scale_source == "norm":
        found = np.unique(draws)
        assert len(found) == 2**bits
        np.testing.assert_allclose(found, -found[::-1], rtol=1e-6)
        np.testing.assert_allclose(draws[:, -2:], [[-span, span]] * DRAWS, rtol=1e-6)
    else:
        assert np.abs(draws - np.asarray(h)[0, :, 0]).max() < 4.1 * span / (2**bits - 1)
        np.testing.assert_allclose(draws[:, -2:].mean(0), [-2 * span, 2 * span], rtol=0.02)
