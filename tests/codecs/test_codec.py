"""What every codec has in common, and the two simplest ones."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp import AvgPool, BlockSparse, Cast, Exact, Packed, PerSample, Quantize
from jaxcomp.codecs import Encoded
from jaxcomp.codecs._codec import array_nbytes
from tests.helpers import (
    DTYPES,
    as_float,
    assert_same_bits,
    collectives,
    normal,
    shard,
    without_type_checks,
)

CODECS = [
    Exact(),
    Cast("bfloat16"),
    AvgPool(2),
    *(Quantize(bits) for bits in (1, 2, 3, 4, 8)),
    Quantize(2, "row", "nearest"),
    PerSample((4, 1)),
    BlockSparse((4, 1), 0.5),
]
each_codec = pytest.mark.parametrize("codec", CODECS, ids=str)
# One for each way of storing: 3 bits are native ones of 2 and single bits in bytes.
each_storage = pytest.mark.parametrize(
    "codec",
    [Cast(), AvgPool(2), Quantize(3), Quantize(4, "row"), BlockSparse((4, 1), 0.5, Quantize(4))],
    ids=str,
)


def assert_near(actual, expected):
    """Equal up to the last place: fusion may round differently."""
    np.testing.assert_allclose(as_float(actual), as_float(expected), rtol=0, atol=1e-6)


@each_codec
def test_frozen_and_hashable(codec):
    assert hash(codec) == hash(dataclasses.replace(codec))
    assert codec == dataclasses.replace(codec)
    for field in dataclasses.fields(codec):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(codec, field.name, getattr(codec, field.name))


@each_codec
@pytest.mark.parametrize("dtype", DTYPES)
def test_shape_dtype_and_bytes(codec, dtype):
    x = normal((2, 5, 7, 3), dtype)
    encoded = jax.eval_shape(codec.encode, x)
    decoded = jax.eval_shape(codec.decode, encoded)
    assert isinstance(encoded, Encoded)
    assert (decoded.shape, decoded.dtype) == (x.shape, x.dtype)
    leaves = jax.tree.leaves(encoded)
    nbytes = sum(array_nbytes(leaf.shape, leaf.dtype) for leaf in leaves)
    assert codec.nbytes(x.shape, dtype) == encoded.nbytes == nbytes


@each_storage
def test_vmap_and_scan_equal_a_loop(codec):
    """Odd sizes, so that codes of a scan step do not start on a byte."""
    x = normal((3, 2, 3, 5, 7))

    @jax.jit
    def each_way(x):
        batched = jax.vmap(codec.decode)(jax.vmap(codec.encode)(x))
        _, stacked = jax.lax.scan(lambda carry, x: (carry, codec.encode(x)), 0, x)
        _, scanned = jax.lax.scan(lambda carry, code: (carry, codec.decode(code)), 0, stacked)
        return jnp.stack([codec.decode(codec.encode(x)) for x in x]), batched, scanned

    expected, batched, scanned = each_way(x)
    assert_near(batched, expected)
    assert_near(scanned, expected)


@each_storage
def test_eight_devices_encode_as_one_and_do_not_communicate(codec):
    x = normal((16, 4, 5, 8))
    sharded = shard(x)
    encoded = jax.jit(codec.encode)(sharded)
    assert_same_bits(encoded, jax.jit(codec.encode)(x))
    assert all(leaf.sharding.spec[0] == "batch" for leaf in jax.tree.leaves(encoded))
    assert collectives(codec.encode, sharded) == set()
    assert collectives(codec.decode, encoded) == set()
    assert_near(jax.jit(codec.decode)(encoded), jax.jit(lambda x: codec.decode(codec.encode(x)))(x))


@each_storage
def test_empty_batch(codec):
    x = jnp.zeros((0, 4, 4, 3))
    encoded = jax.jit(codec.encode)(x)
    assert jax.jit(codec.decode)(encoded).shape == x.shape
    assert codec.nbytes(x.shape, x.dtype) == encoded.nbytes == 0


@pytest.mark.parametrize(
    "codec", [Cast(), Quantize(3), Quantize(2, "sample"), Quantize(2, "row")], ids=str
)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3)])
def test_few_axes(codec, shape):
    x = normal(shape)
    decoded = jax.jit(lambda x: codec.decode(codec.encode(x)))(x)
    assert (decoded.shape, decoded.dtype) == (x.shape, x.dtype)
    spread = np.ptp(as_float(x)) if x.size else 0.0
    assert np.all(np.abs(as_float(decoded) - as_float(x)) <= spread + 0.01)


@each_codec
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool, jnp.float8_e4m3fn, jnp.complex64])
def test_other_dtypes_are_an_error(codec, dtype):
    name = jnp.dtype(dtype).name
    message = rf"{type(codec).__name__} stores \('float32', .*got x of dtype {name}"
    with pytest.raises(TypeError, match=message):
        codec.nbytes((2, 4, 4, 3), dtype)
    with pytest.raises(TypeError, match=message):
        codec.encode(jnp.zeros((2, 4, 4, 3), dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_is_exact(dtype):
    x = normal((3, 4), dtype)
    assert_same_bits(Exact().decode(Exact().encode(x)), x)
    assert Exact().nbytes((3, 4), dtype) == 12 * jnp.dtype(dtype).itemsize


@pytest.mark.parametrize(
    ("stored", "mantissa", "nbytes"),
    [("bfloat16", 8, 30), ("float16", 11, 30), ("float8_e4m3fn", 4, 15), ("float4_e2m1fn", 2, 8)],
)
def test_cast_rounds_to_nearest(stored, mantissa, nbytes):
    """`mantissa` counts the leading bit; 1 to 4 is within the range of every dtype here."""
    x = jnp.asarray(np.random.default_rng(0).uniform(1, 4, (3, 5)), jnp.float32)
    codec = Cast(stored)
    decoded = as_float(codec.decode(codec.encode(x)))
    value = as_float(x)
    scale = 2.0 ** (np.floor(np.log2(value)) + 1 - mantissa)
    np.testing.assert_array_equal(decoded, np.round(value / scale) * scale)
    assert codec.nbytes((3, 5), jnp.float32) == nbytes


def test_cast_keeps_non_finite():
    x = jnp.array([np.nan, np.inf, -np.inf, 1.0])
    for stored in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"):
        decoded = Cast(stored).decode(Cast(stored).encode(x))
        np.testing.assert_array_equal(np.isfinite(decoded), [False, False, False, True])


@pytest.mark.parametrize("dtype", ["int8", "bool", "complex64", "float12", None])
def test_cast_to_another_kind_is_an_error(dtype):
    message = f"dtype={dtype!r}: expected the name of a floating-point dtype"
    with without_type_checks(), pytest.raises(TypeError, match=message):
        Cast(dtype)


def test_equivalent_dtypes_make_equal_casts():
    with without_type_checks():
        assert Cast(jnp.bfloat16) == Cast("bfloat16")


def test_names_differ():
    names = [codec.name for codec in (Exact(), Cast(), AvgPool(), Quantize(), Packed())]
    assert names == ["exact", "cast", "avg_pool", "quantize", "packed"]
