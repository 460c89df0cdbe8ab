import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp import BlockSparse, Cast, Exact, Quantize
from jaxcomp.codecs import _block_sparse
from tests.helpers import (
    DTYPES,
    as_float,
    assert_same_bits,
    assert_unbiased,
    normal,
    without_type_checks,
)


def pruned(x, block, kept):
    """The dense array, block by block in float64; of equal blocks the first are kept."""
    out = np.zeros_like(x)
    for sample, result in zip(x, out, strict=True):
        sample, result = sample.reshape(-1, x.shape[-1]), result.reshape(-1, x.shape[-1])
        for top in range(0, len(sample), block[0]):
            rows = slice(top, top + block[0])
            lefts = range(0, x.shape[-1], block[1])
            norms = [np.abs(sample[rows, left : left + block[1]]).sum() for left in lefts]
            for i in np.argsort([-norm for norm in norms], kind="stable")[:kept]:
                columns = slice(lefts[i], lefts[i] + block[1])
                result[rows, columns] = sample[rows, columns]
    return out


@st.composite
def cases(draw):
    """Blocks that divide the matrix or do not, or are larger."""
    shape = (2, *draw(st.lists(st.integers(1, 7), max_size=2)), draw(st.integers(2, 24)))
    block = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    return shape, block, draw(st.sampled_from([0.01, 0.25, 0.5, 0.7, 1.0]))


def sizes(shape, block, density):
    """Rows of blocks, kept blocks in each, and the height and width of one."""
    height, width = math.prod(shape[1:-1]), shape[-1]
    tall, wide = min(block[0], height), min(block[1], width)
    columns = math.ceil(width / wide)
    return math.ceil(height / tall), math.ceil(density * columns), tall, wide


@hypothesis.settings(max_examples=20)
@hypothesis.given(cases(), st.sampled_from(DTYPES), st.integers(0, 100))
def test_the_largest_blocks_come_back_exactly_or_it_is_an_error(case, dtype, seed):
    shape, block, density = case
    codec = BlockSparse(block, density)
    rows, kept, tall, wide = sizes(shape, block, density)
    nbytes = 2 * rows * kept * (tall * wide * jnp.dtype(dtype).itemsize + 1)
    if nbytes >= math.prod(shape) * jnp.dtype(dtype).itemsize:
        with pytest.raises(ValueError, match=f"in {nbytes} bytes"):
            codec.nbytes(shape, dtype)
        return
    assert codec.nbytes(shape, dtype) == nbytes
    x = normal(shape, dtype, seed)
    decoded = jax.jit(lambda x: codec.decode(codec.encode(x)))(x)
    assert decoded.dtype == dtype
    np.testing.assert_array_equal(as_float(decoded), pruned(as_float(x), (tall, wide), kept))


@pytest.mark.parametrize(
    ("columns", "name"), [(256, "uint8"), (257, "int16"), (2**15, "int16"), (2**15 + 1, "int32")]
)
def test_indices_take_the_narrowest_dtype(columns, name):
    codec, shape = BlockSparse((1, 2), 1 / 64), (1, 2, 2 * columns)
    indices, data = jax.eval_shape(codec.encode, jnp.ones(shape)).arrays
    assert indices.dtype.name == name
    assert indices.shape == data.shape[:2] == (1, 2 * math.ceil(columns / 64))


@pytest.mark.parametrize("values", [Cast("bfloat16"), Quantize(bits=4), Quantize(bits=3)])
def test_values_through_another_codec(values):
    """196 tokens and 100 features, neither a multiple of 8."""
    x, exact = normal((3, 14, 14, 100)), BlockSparse(8, 0.25)
    codec = BlockSparse(8, 0.25, values)
    encoded = jax.jit(codec.encode)(x, 5)
    data = exact.data(exact.encode(x))
    assert data.shape == (3, 25 * 4, 8, 8)
    assert codec.nbytes(x.shape, x.dtype) == 300 + values.nbytes(data.shape, x.dtype)
    assert_same_bits(encoded.arrays[0], exact.encode(x).arrays[0])
    assert_same_bits(codec.data(encoded), values.decode(values.encode(data, 5)))
    kept = np.asarray(exact.decode(exact.encode(x))) != 0
    np.testing.assert_array_equal(np.asarray(codec.decode(encoded))[~kept], 0)


@pytest.mark.parametrize("shape", [(2, 13, 21), (4, 40)])
@pytest.mark.parametrize("values", [Cast("bfloat16"), None])
def test_is_a_bcsr_matrix(shape, values):
    x = normal(shape)
    codec = BlockSparse(4, 0.5) if values is None else BlockSparse(4, 0.5, values)
    encoded = codec.encode(x)
    matrix = jax.jit(codec.to_bcsr)(encoded)
    assert (matrix.n_batch, matrix.n_sparse, matrix.n_dense) == (1, 2, 2)
    if values is None:
        assert_same_bits((matrix.indices, matrix.data), encoded.arrays)
    batch, rows, columns, tall, wide = matrix.shape
    dense = matrix.todense().swapaxes(2, 3).reshape(batch, rows * tall, columns * wide)
    height, width = math.prod(shape[1:-1]), shape[-1]
    assert_same_bits(dense[:, :height, :width].reshape(shape), codec.decode(encoded))


def test_of_equal_blocks_the_first_are_kept():
    codec = BlockSparse((2, 3), 0.4)
    for x in (jnp.ones((2, 4, 15)), jnp.zeros((2, 4, 15))):
        encoded = codec.encode(x)
        np.testing.assert_array_equal(encoded.arrays[0], [[0, 1, 0, 1]] * 2)
        assert_same_bits(codec.decode(encoded), x.at[..., 6:].set(0))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("values", [None, Quantize(bits=4)])
def test_non_finite_blocks_come_first(bad, values):
    x = 100 * np.array(normal((2, 8, 32)))
    x[1, 5, 20:23] = 0
    x[1, 5, 22] = bad
    codec = BlockSparse(4, 1 / 8) if values is None else BlockSparse(4, 1 / 8, values)
    decoded = codec.decode(codec.encode(jnp.asarray(x)))
    assert not np.isfinite(decoded[1, 5, 22])
    assert np.isfinite(decoded[0]).all()
    if values is None:
        assert_same_bits(decoded[1, 4:, 20:24], jnp.asarray(x[1, 4:, 20:24]))
        np.testing.assert_array_equal(decoded[1, 4:, :20], 0)


def test_density_one_needs_smaller_values():
    x = normal((2, 16, 16))
    with pytest.raises(ValueError, match="in 2056 bytes, and it has 2048; expected a lower"):
        BlockSparse(8, 1.0).encode(x)
    codec = BlockSparse(8, 1.0, Cast("bfloat16"))
    assert_same_bits(codec.decode(codec.encode(x)), x.astype(jnp.bfloat16).astype(jnp.float32))


def test_density_counts_whole_blocks():
    """Rounded up, but not for the last place of 0.1 * 30."""
    kept = {d: BlockSparse(1, d).grid((1, 30)).kept for d in (0.1, 0.11, 0.001, 1.0)}
    assert kept == {0.1: 3, 0.11: 4, 0.001: 1, 1.0: 30}


@pytest.mark.parametrize("block", [0, -1, True, 2.0, (8,), (8, 0), (8, 8, 8), [8, 8]])
def test_other_blocks_are_an_error(block):
    with without_type_checks(), pytest.raises(ValueError, match=r"block=.*: expected a positive"):
        BlockSparse(block)


@pytest.mark.parametrize("density", [0, -0.5, 1.5, math.nan, True])
def test_other_densities_are_an_error(density):
    with without_type_checks(), pytest.raises(ValueError, match=f"density={density}: expected"):
        BlockSparse(8, density)


def test_other_values_are_an_error():
    with without_type_checks(), pytest.raises(TypeError, match="values=4: expected a codec"):
        BlockSparse(8, values=4)


def test_arrays_without_samples_are_an_error():
    with pytest.raises(ValueError, match=r"needs shape \(batch, ..., features\); got \(64,\)"):
        BlockSparse().encode(jnp.ones(64))


def test_a_square_has_one_name():
    assert BlockSparse(8) == BlockSparse((8, 8))


@pytest.mark.parametrize("values", [Exact(), Quantize(4)], ids=str)
def test_a_sample_of_blocks_is_unbiased(values):
    """Also beside rows of zeros, blocks of zeros, and blocks of which few are drawn."""
    codec = BlockSparse((4, 4), 0.5, values, sampled=True)
    assert codec.unbiased
    assert not BlockSparse((4, 4), 0.5, values).unbiased
    x = normal((2, 24, 44)) * jnp.exp(1.2 * normal((1, 1, 44), seed=1))
    x = x.at[0, :8].set(0).at[1, 8:16, 8:].set(0)

    @jax.jit
    @jax.vmap
    def draw(seed):
        code = codec.encode(x, seed)
        return codec.decode(code), codec.slots(code) > 0

    decoded, kept = draw(jnp.arange(4000, dtype=jnp.uint32))
    at_random = decoded.std(0) > 1e-3 * jnp.abs(x).max()
    assert at_random.mean() > 0.3
    assert_unbiased(decoded[:, at_random], x[at_random])
    assert (kept.sum(-1) == codec.grid(x.shape).kept).all()
    if values == Exact():
        surely = kept.all(0).repeat(4, 1).repeat(4, 2)[:, :24, :44]
        np.testing.assert_allclose(decoded[0][surely], x[surely], rtol=1e-5)


def test_chances_are_proportional_to_sizes_and_at_most_1():
    sizes = jnp.array([1.0, 100.0, 2.0, 4.0, 3.0])
    chances = _block_sparse._chances(sizes, 3)
    np.testing.assert_allclose(chances, [0.2, 1, 0.4, 0.8, 0.6], rtol=1e-4)
    start = jnp.linspace(0.001, 0.999, 999)
    drawn = _block_sparse._systematic(jnp.broadcast_to(chances, (999, 5)), 3, start)
    assert (jnp.diff(drawn) > 0).all()
    often = [float((drawn == block).any(-1).mean()) for block in range(5)]
    np.testing.assert_allclose(often, chances, atol=2e-3)


def test_sampled_is_true_or_false():
    with without_type_checks(), pytest.raises(TypeError, match=r"sampled=1: expected True"):
        BlockSparse(8, sampled=1)
