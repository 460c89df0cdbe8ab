import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp import memory
from jaxcomp.codecs import packing
from jaxcomp.memory._compiling import compile_step
from jaxcomp.memory._targets import resolve
from jaxcomp.memory._tracing import trace

SHAPES = st.lists(st.integers(0, 9), max_size=5).map(tuple)


@hypothesis.settings(max_examples=15)
@hypothesis.given(SHAPES, st.sampled_from(packing.WIDTHS), st.integers(0, 100))
def test_round_trip(shape, bits, seed):
    codes = np.random.default_rng(seed).integers(0, 2**bits, shape).astype(np.int32)
    unpacked = jax.jit(lambda c: packing.unpack(packing.pack(c, bits), shape, bits))(codes)
    assert unpacked.dtype == jnp.int32
    np.testing.assert_array_equal(unpacked, codes)


@pytest.mark.parametrize("bits", packing.WIDTHS)
def test_every_code_in_every_place(bits):
    codes = (np.arange(256)[:, None] + np.arange(11)) % 2**bits
    unpacked = packing.unpack(packing.pack(jnp.asarray(codes), bits), codes.shape, bits)
    np.testing.assert_array_equal(unpacked, codes)


@pytest.mark.parametrize("bits", packing.WIDTHS)
def test_codes_out_of_range_lose_their_upper_bits_only(bits):
    codes = jnp.arange(256)[None]
    unpacked = packing.unpack(packing.pack(codes, bits), codes.shape, bits)
    np.testing.assert_array_equal(unpacked, codes % 2**bits)


@pytest.mark.parametrize(
    ("shape", "packed"),
    [((5, 3, 16), (5, 3, 2)), ((5, 16, 3), (5, 16, 1)), ((9,), (2,)), ((3, 0), (3, 0)), ((), (1,))],
)
def test_bits_share_a_byte_along_the_last_axis(shape, packed):
    (array,) = packing.pack(jnp.zeros(shape, jnp.int32), 1)
    assert (array.shape, array.dtype) == (packed, jnp.uint8)


@pytest.mark.parametrize(
    ("shape", "packed"), [((5, 3, 16), (5, 3, 8)), ((5, 16, 3), (5, 16, 2)), ((), (1,))]
)
def test_pairs_share_four_bits_along_the_last_axis(shape, packed):
    (array,) = packing.pack(jnp.zeros(shape, jnp.int32), 2)
    assert (array.shape, array.dtype) == (packed, jnp.uint4)


@pytest.mark.parametrize("part", [packing._ONE, packing._TWO, packing._PARTS[5][1]])
@pytest.mark.parametrize("size", [0, 8, 64, 256, 264, 1024, 1032, 2056])
def test_all_platforms_pack_the_same_bytes(part, size):
    @jax.jit
    def all_ways(codes):
        packed = packing._join_by_matmul(part, codes)
        split = (way(part, packed) for way in (packing._split_by_matmul, packing._split_by_shift))
        return packed, packing._join_by_sum(part, codes), *split

    codes = jnp.asarray(np.random.default_rng(0).integers(0, 2**part.bits, (3, size)), jnp.uint8)
    packed, summed, *split = all_ways(codes)
    np.testing.assert_array_equal(packed, summed)
    for unpacked in split:
        np.testing.assert_array_equal(unpacked, codes)


@pytest.mark.parametrize("bits", [3, 5, 6])
@pytest.mark.parametrize("shape", [(), (7,), (3, 16), (2, 5, 17), (4, 0), (0, 3)])
def test_gpus_and_tpus_pack_codes_in_two_parts_into_the_same_bytes(shape, bits):
    shape = shape or (1,)  # as `pack` does
    codes = jnp.asarray(np.random.default_rng(0).integers(0, 2**bits, shape), jnp.int32)
    expected = jax.jit(functools.partial(packing._each_part, bits))(codes)
    joined = jax.jit(functools.partial(packing._parts_by_sum, bits))(codes)
    for one, other in zip(joined, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_array_equal(one.astype(jnp.uint8), other.astype(jnp.uint8))


@pytest.mark.parametrize("bits", [0, 7, 16, -1, True, 2.0, None, "2"])
def test_other_bits_are_an_error(bits):
    with pytest.raises(Exception, match=r"bits"):
        packing.check_bits(bits)


def _beside_sums_of_rows(codes, bits):
    """Packs and unpacks where a GPU takes sums of rows in the same kernels, two columns at once."""
    packed = jax.lax.optimization_barrier(packing.pack(codes.astype(jnp.int32), bits))
    unpacked = packing.unpack(packed, codes.shape, bits)
    moments = codes.sum(-1), (codes * codes).sum(-1), (codes * unpacked).sum(-1)
    return packed, unpacked, unpacked * codes, moments


@pytest.mark.parametrize("columns", [96, 200])
@pytest.mark.parametrize("bits", packing.WIDTHS)
def test_packing_beside_sums_of_rows(bits, columns):
    codes = np.random.default_rng(0).integers(0, 2**bits, (64, 96, columns)).astype(np.float32)
    _, unpacked, _, (sums, _, squares) = jax.jit(_beside_sums_of_rows, static_argnums=1)(
        codes, bits
    )
    np.testing.assert_array_equal(unpacked, codes)
    np.testing.assert_allclose(sums, codes.sum(-1), rtol=1e-5)
    np.testing.assert_allclose(squares, (codes**2).sum(-1), rtol=1e-5)


@pytest.mark.aot
@pytest.mark.parametrize("bits", [1, 2, 3, 5, 6])
def test_programs_for_a_gpu_have_no_integers_of_two_bits(bits):
    codes = jax.ShapeDtypeStruct((64, 96, 96), jnp.float32)
    h100 = resolve("h100")
    traced = trace(lambda c: _beside_sums_of_rows(c, bits), codes, target=h100)
    assert "u2[" not in compile_step(traced, h100).hlo_text


def _there_and_back(codes, bits):
    packed = packing.pack(codes, bits)
    return packed, packing.unpack(jax.lax.optimization_barrier(packed), codes.shape, bits)


@pytest.mark.aot
@pytest.mark.parametrize("bits", [2, 3, 6])
@pytest.mark.parametrize("size", [24, 32, 48, 128])
def test_gpus_pack_an_axis_that_is_spread_over_devices(size, bits):
    mesh = memory.mesh("h100:8", (8,), ("model",))
    sharding = jax.NamedSharding(mesh, jax.P(None, "model"))
    codes = jax.ShapeDtypeStruct((3, size), jnp.uint8, sharding=sharding)
    report = memory.analyze(lambda c: _there_and_back(c, bits), codes, target="h100:8")
    assert report.total_bytes > 0


@pytest.mark.aot
@pytest.mark.parametrize("bits", [2, 3, 6])
def test_gpus_pack_a_transposed_array(bits):
    codes = jax.ShapeDtypeStruct((8, 12, 64, 1024), jnp.uint8)
    report = memory.analyze(
        lambda c: _there_and_back(c.transpose(0, 3, 1, 2), bits), codes, target="h100"
    )
    assert report.total_bytes > 0
