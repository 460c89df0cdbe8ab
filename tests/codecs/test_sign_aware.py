import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp import DualPrecision, SignAware
from jaxcomp.codecs import noise
from jaxcomp.codecs._ranges import reciprocal
from jaxcomp.memory._compiling import compile_step
from jaxcomp.memory._targets import resolve
from jaxcomp.memory._tracing import trace
from tests.helpers import DTYPES, as_float, assert_unbiased, normal, slow, without_type_checks


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5, 5, 7), (2, 6), (4,), (2, 0, 3)])
def test_zeros_are_exact_and_bytes_are_declared(shape, dtype):
    codec = SignAware(4)
    x = jax.nn.relu(normal(shape, dtype))
    encoded = codec.encode(x)
    decoded = codec.decode(encoded)
    assert (decoded.shape, decoded.dtype) == (x.shape, x.dtype)
    assert (as_float(decoded)[as_float(x) == 0] == 0).all()
    assert encoded.nbytes == codec.nbytes(shape, dtype)


def test_bytes_are_the_codes_a_scale_in_bfloat16_for_each_channel_an_offset_and_a_seed_for_all():
    expected = 8 * 16 * 16 * 32 // 2 + 8 * 32 * 2 + 4 + 4
    assert SignAware(4).nbytes((8, 16, 16, 32), jnp.bfloat16) == expected


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_unbiased_with_known_scales(bits):
    codec = SignAware(bits)
    x = jnp.linspace(0.1, 0.9 * codec.levels.top, 24).reshape(2, 3, 4)
    scales = jnp.array([[[0.5, 1.0, 2.0, 4.0]]])

    def draw(seed):
        return codec.decode(codec.encode_scaled(x * scales, scales, noise.folded(seed, 0)))

    assert_unbiased(jax.jit(jax.vmap(draw))(jnp.arange(4096)), x * scales)


def test_a_nan_shows_in_its_channel_and_sample_only():
    x = jnp.ones((2, 3, 3, 2)).at[0, 1, 1, 0].set(jnp.nan)
    decoded = np.asarray(SignAware(4).decode(SignAware(4).encode(x)))
    assert np.isnan(decoded[0, :, :, 0]).all()
    assert np.isfinite(decoded[1]).all()
    assert np.isfinite(decoded[..., 1]).all()


def test_a_channel_of_zeros_stays_zero():
    x = jnp.zeros((2, 3, 3, 2))
    np.testing.assert_array_equal(SignAware(2).decode(SignAware(2).encode(x)), x)


@pytest.mark.parametrize("bits", [0, 1, 5, 8, True, 2.0, None])
def test_other_bits_are_an_error(bits):
    with pytest.raises(Exception, match="bits"):
        SignAware(bits)


@pytest.mark.parametrize("source", ["sample", "", None])
def test_other_scale_sources_are_an_error(source):
    with (
        without_type_checks(),
        pytest.raises(ValueError, match=r"scale_source=.*expected one of \('norm'"),
    ):
        SignAware(4, scale_source=source)


def test_signed_codes_are_not_made_alone():
    with pytest.raises(ValueError, match="signed=True: expected False"):
        SignAware(4, signed=True).encode(jnp.ones((2, 3, 3, 4)))


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("value", [-1.002, 0.0, 3.0])
def test_a_range_of_one_value_comes_back_as_it(value, bits):
    codec = SignAware(bits, signed=True, scale_source="range")
    h = jnp.full((1, 1, 1, 1), value)
    for threshold in (-jnp.inf, -1.001, 0.5, 2.0, jnp.inf):
        limit = jnp.full((1, 1, 1, 1), threshold)
        code = codec.encode_preactivation(h, limit, h > limit, jnp.uint32(0))
        decoded, positive = codec.decode_preactivation(code, h.shape)
        np.testing.assert_allclose(decoded, h, rtol=0.01, atol=1e-6)
        assert bool(positive[0, 0, 0, 0]) == (value > threshold)


def test_a_threshold_is_clipped_to_the_usual_values():
    """Levels that start at it cover a normal distribution, wherever the ReLU starts."""
    codec = SignAware(4, signed=True)
    h = normal((2, 8, 8, 4))
    for asked, used in ((-3.5, -3.0), (2.5, 2.0), (-2.5, -2.5)):
        positive, salt = h > asked, jnp.uint32(0)
        code, expected = (
            codec.encode_preactivation(h, jnp.full((1, 1, 1, 1), at), positive, salt)
            for at in (asked, used)
        )
        np.testing.assert_array_equal(code.packed, expected.packed)
        assert float(code.threshold.ravel()[0]) == used


def test_stopped_values_have_little_noise_at_4_bits():
    """A norm's backward pass multiplies them by a mean that is large where a channel is small."""
    codec, h = SignAware(4, signed=True), normal((4, 64, 64, 4))
    code = codec.encode_preactivation(h, jnp.zeros((1, 1, 1, 1)), h > 0, jnp.uint32(0))
    decoded, _ = codec.decode_preactivation(code, h.shape)
    stopped = np.asarray(h) < 0
    assert np.mean((decoded - h)[stopped] ** 2) < 0.7  # with the levels -6 and 0 it is 3.8


def test_steps_that_are_no_normal_numbers_have_the_reciprocal_1():
    tiny = jnp.finfo(jnp.float32).tiny
    found = reciprocal(jnp.array([0.0, tiny / 2, tiny, 0.5, jnp.nan]))
    np.testing.assert_array_equal(found, [1, 1, 1 / tiny, 2, jnp.nan])


def test_negative_values_just_below_the_threshold_stay_there():
    codec = SignAware(2, signed=True, scale_source="range")
    h = jnp.array([-1.002, 0.5, 1.0, 2.0]).reshape(1, 2, 2, 1)
    limit = jnp.full((1, 1, 1, 1), -1.001)
    code = codec.encode_preactivation(h, limit, h > limit, jnp.uint32(0))
    decoded, positive = codec.decode_preactivation(code, h.shape)
    assert decoded[0, 0, 0, 0] == pytest.approx(-1.002, abs=0.01)
    assert positive.ravel().tolist() == [False, True, True, True]


@pytest.mark.parametrize("codec", [SignAware(4), slow(DualPrecision(window=2))], ids=str)
def test_what_compilers_code_by_is_rounded_as_what_they_store(codec):
    pytest.importorskip("jax_cuda13_plugin")
    x = jax.ShapeDtypeStruct((8, 8, 8, 16), jnp.float32)
    step = trace(lambda x: codec.decode(codec.encode(x)), x)
    text = compile_step(step, resolve("h100"), xla_remat=True).hlo_text
    assert "reduce-precision(" in text


def test_a_range_starts_at_the_mean_of_what_the_relu_stops():
    h = normal((2, 3, 3, 4))
    positive = (h > 0).at[..., 0].set(True)  # all of the first channel
    salt = jnp.uint32(0)
    for bits, signed in ((4, False), (4, True), (2, False)):
        codec = SignAware(bits, signed=signed, scale_source="range")
        low, high = codec.encode_preactivation(h, jnp.zeros((1, 1, 1, 1)), positive, salt).ends
        stopped = np.where(positive, np.nan, h)
        mean = np.nanmean(stopped[..., 1:], (1, 2), keepdims=True)
        least = np.asarray(h).min((1, 2), keepdims=True)
        expected = (
            np.concatenate([least[..., :1], mean], -1) if codec.levels.negatives == 1 else least
        )
        np.testing.assert_allclose(low, expected, rtol=0.02, atol=0.02)
        np.testing.assert_allclose(high, np.asarray(h).max((1, 2), keepdims=True), rtol=0.02)
