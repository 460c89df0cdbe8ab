import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp import PerSample, Quantize
from tests.helpers import (
    as_float,
    assert_same_bits,
    assert_unbiased,
    collectives,
    normal,
    shard,
    without_type_checks,
)

CODEC = PerSample((8, 4, 2, 1))


def growing(batch, dtype=jnp.float32):
    """Samples whose ranges grow within each run of 4."""
    sizes = np.arange(batch) % 4 + 1.0
    return normal((batch, 5, 6, 3), dtype) * jnp.asarray(sizes, dtype)[:, None, None, None]


def errors(x, **kwargs):
    """Greatest error of each sample, in ranges of its channels."""
    decoded = jax.jit(lambda x: CODEC.decode(CODEC.encode(x, **kwargs)))(x)
    spread = np.ptp(as_float(x), axis=(1, 2), keepdims=True)
    return (np.abs(as_float(decoded) - as_float(x)) / spread).max((1, 2, 3))


@pytest.mark.parametrize("batch", [4, 8, 12])
def test_more_bits_for_larger_ranges(batch):
    bounds = 1 / (2.0 ** np.array([1, 2, 4, 8]) - 1)
    each = errors(growing(batch)).reshape(-1, 4)
    assert np.all(each < bounds + 1e-6)
    assert np.all(each[:, :-1] > bounds[1:])  # more error than the next width would allow


def test_importance_outweighs_the_range():
    each = errors(growing(4), importance=jnp.array([1e6, 1.0, 1.0, 1.0]))
    assert each.argmin() == 0


def test_equal_samples_keep_their_order():
    x = jnp.broadcast_to(normal((1, 5, 6, 3)), (4, 5, 6, 3))
    order, *_ = jax.jit(CODEC.encode)(x).arrays
    assert order.tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("batch", [1, 3, 6])
def test_samples_after_the_last_run_have_the_width_below_the_mean(batch):
    x = growing(batch)
    whole = batch - batch % 4
    decoded = jax.jit(lambda x: CODEC.decode(CODEC.encode(x)))(x)
    rest = Quantize(2)  # the mean of the ranks is 3.75; its noise is that of a fifth class
    seed = 4 * 0x9E3779B9 % 2**32
    expected = jax.jit(lambda x: rest.decode(rest.encode(x, jnp.uint32(seed))))(x[whole:])
    assert_same_bits(decoded[whole:], expected)


def test_equal_widths_are_those_of_quantize():
    x = growing(8)
    whole, each = PerSample((2, 2)), Quantize(2)
    pairs = 8 // 2 * 2  # the order of a run, in a byte each
    assert whole.nbytes(x.shape, x.dtype) == each.nbytes(x.shape, x.dtype) + pairs


def test_unbiased():
    x = growing(8)
    decode = jax.jit(jax.vmap(lambda seed: CODEC.decode(CODEC.encode(x, seed))))
    place = np.argsort(np.abs(as_float(x)).reshape(8, -1), axis=1)[:, :20]
    draws = as_float(decode(jnp.arange(200))).reshape(200, 8, -1)
    chosen = [i for i in range(8) if i % 4 < 2]  # of 1 and 2 bits
    rows = np.array(chosen)[:, None]
    assert_unbiased(draws[:, rows, place[chosen]], as_float(x).reshape(8, -1)[rows, place[chosen]])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_sample_that_is_not_finite_leaves_the_others_alone(bad):
    x = growing(8)
    broken = x.at[1, 2, 3, 0].set(bad)
    decode = jax.jit(lambda x: CODEC.decode(CODEC.encode(x)))
    decoded = decode(broken)
    assert np.isnan(as_float(decoded[1, ..., 0])).all()
    assert np.isfinite(as_float(decoded[jnp.arange(8) != 1])).all()
    assert_same_bits(decoded[4:], decode(x)[4:])
    order, *_ = jax.jit(CODEC.encode)(broken).arrays
    assert order[0, -1] == 1


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_ranges_that_overflow_come_first(dtype):
    large = float(jnp.finfo(dtype).max)
    x = growing(4, dtype).at[0, 0, 0, 0].set(large).at[0, 0, 1, 0].set(-large)
    encoded = jax.jit(CODEC.encode)(x)
    assert encoded.arrays[0][0, 0] == 0
    assert np.isfinite(as_float(jax.jit(CODEC.decode)(encoded))).all()


def test_eight_devices_encode_as_one_and_do_not_communicate():
    x = growing(64)
    sharded = shard(x)
    encoded = jax.jit(CODEC.encode)(sharded)
    assert_same_bits(encoded, jax.jit(CODEC.encode)(x))
    assert collectives(CODEC.encode, sharded) == set()
    assert collectives(CODEC.decode, encoded) == set()


def test_vmap_equals_a_loop():
    x = jnp.stack([growing(8), -growing(8)])
    codes = jax.jit(jax.vmap(CODEC.encode))(x)
    for i in range(2):
        one = jax.jit(CODEC.encode)(x[i])
        assert_same_bits(jax.tree.map(lambda a, i=i: a[i], codes.arrays), one.arrays)


@pytest.mark.parametrize("bits", [(), (2,), (1, 2), (3, 2), [2, 1], (2,) * 257])
def test_other_bits_are_an_error(bits):
    with without_type_checks(), pytest.raises(ValueError, match="expected 2 to 256 of"):
        PerSample(bits)


def test_bad_arrays_are_an_error():
    with pytest.raises(ValueError, match="stores arrays of samples"):
        CODEC.encode(jnp.ones(4))
    with without_type_checks(), pytest.raises(ValueError, match="importance of shape"):
        CODEC.encode(growing(4), importance=jnp.ones(3))


def test_noise_differs_between_classes_and_the_rest():
    x = jnp.broadcast_to(normal((1, 9, 9, 3)), (5, 9, 9, 3))
    codec = PerSample((2, 2, 1, 1))
    draw = jax.jit(jax.vmap(lambda seed: codec.decode(codec.encode(x, seed)) - x))
    errors = as_float(draw(jnp.arange(50))).reshape(50, 5, -1)
    errors -= errors.mean(0)
    moving = errors[:, :, (errors.std(0) > 0).all(0)]
    correlation = np.corrcoef(moving.transpose(1, 0, 2).reshape(5, -1))
    assert np.all(np.abs(correlation - np.eye(5)) < 0.06)
