"""What every codec has in common, and the two simplest ones."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp import (
    AvgPool,
    BlockSparse,
    Cast,
    DualPrecision,
    Exact,
    Float8,
    Offload,
    Packed,
    PerSample,
    Quantize,
    SignAware,
)
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

SAMPLED = [AvgPool(2, Quantize(4)), BlockSparse((4, 1), 0.5, sampled=True)]
CODECS = [
    Exact(),
    Cast("bfloat16"),
    AvgPool(2),
    *(Quantize(bits) for bits in (1, 2, 3, 4, 5, 6, 8)),
    Quantize(2, "row", "nearest"),
    PerSample((4, 1)),
    BlockSparse((4, 1), 0.5),
    *SAMPLED,
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


# With the part of the largest number up to which values decode to finite ones.
OF_FLOATS = [
    (Exact(), 1),
    (Cast("bfloat16"), 0.99),
    (AvgPool(3), 1),
    (Quantize(2), 1),
    (Quantize(8, "row", "nearest"), 1 - 2**-20),
    (PerSample((4, 1)), 1 - 2**-20),
    (BlockSparse((4, 1), 0.5, Quantize(4, "sample")), 1 - 2**-20),
    (DualPrecision(4, 2), 1),
    (DualPrecision(3, 4, along="features"), 1),
    (SignAware(3), 0.74),
    (Float8(), 1),
    (Float8("e5m2", -2, "nearest"), 1),
    (Offload(Quantize(4)), 1 - 2**-20),
]


@pytest.mark.parametrize(("codec", "part"), OF_FLOATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_finite_values_decode_to_finite_ones(codec, part, dtype):
    """Each sample is one kind of extreme values."""
    info, random, shape = jnp.finfo(dtype), np.random.default_rng(0), (6, 6, 4)
    most, least = part * float(info.max), float(info.smallest_subnormal)
    subnormal = least * random.integers(-50, 50, shape)
    wide = most * random.uniform(-1, 1, shape)
    samples = [
        wide,
        np.abs(wide),
        most * random.choice([-1, 1], shape),
        np.full(shape, most),
        np.full(shape, -most),
        most * (1 - float(info.eps) * random.integers(0, 8, shape)),
        subnormal,
        np.where(wide > 0, wide, subnormal),
    ]
    x = jnp.asarray(np.stack(samples).astype(dtype))
    assert np.isfinite(as_float(x)).all()
    decoded = jax.jit(lambda x: codec.decode(codec.encode(x, 1)))(x)
    assert np.isfinite(as_float(decoded)).all()


@pytest.mark.parametrize("codec", [*(codec for codec, _ in OF_FLOATS), *SAMPLED], ids=str)
@pytest.mark.parametrize("shape", [(8, 16, 8, 16), (8, 1024)])
def test_nan_and_inf_decode_to_non_finite_values(codec, shape):
    """XLA for CPUs computes the extremes of arrays of this size by a library that drops NaNs."""
    if isinstance(codec, AvgPool | BlockSparse | Float8) and len(shape) == 2:
        shape = (8, 32, 32)
    bad = [np.nan, -np.nan, np.inf, -np.inf]
    for dtype in DTYPES if isinstance(codec, Quantize) else (jnp.float32,):
        x = normal(shape, dtype)
        places = [(i, *(n // 2 for n in shape[1:])) for i in range(len(bad))]
        for place, value in zip(places, bad, strict=True):
            x = x.at[place].set(value)
        decoded = as_float(jax.jit(lambda x: codec.decode(codec.encode(x, 1)))(x))
        assert not np.isfinite([decoded[place] for place in places]).any()
        assert np.isfinite(decoded[len(bad) :]).all()


def test_a_nan_makes_its_whole_group_nan():
    x = normal((8, 16, 8, 16)).at[1, 2, 3, 5].set(jnp.nan)
    expected = np.zeros(x.shape, bool)
    expected[1, ..., 5] = True
    codec = Quantize(4)
    for decoded in (codec.decode(codec.encode(x)), jax.jit(codec.decode)(codec.encode(x))):
        np.testing.assert_array_equal(np.isnan(decoded), expected)


@pytest.mark.parametrize("codec", [*CODECS, Packed(), Offload(Quantize(2)), SignAware()], ids=str)
def test_encode_takes_arrays_and_decode_codes_of_the_same_codec_alone(codec):
    x = jnp.zeros((2, 4, 4, 3), bool if isinstance(codec, Packed) else jnp.float32)
    with without_type_checks():
        for other in (None, 1.0, [1.0, 2.0]):
            with pytest.raises(TypeError, match=r"^x=.*: expected an array"):
                codec.encode(other)
        for other in (None, x, codec.encode(x).arrays):
            with pytest.raises(TypeError, match=r"^encoded=.*: expected what .*\.encode returns"):
                codec.decode(other)
    code = Quantize(4).encode(jnp.zeros((2, 4, 4, 3)))
    if codec != Quantize(4):
        with pytest.raises(ValueError, match=r"encoded: expected a code of .*, got one of Quanti"):
            codec.decode(code)


def test_a_code_of_another_codec_is_an_error_in_transformed_functions():
    x, message = normal((3, 4, 5)), r"a code of Quantize\(bits=2.*, got one of Quantize\(bits=4"
    code = jax.vmap(Quantize(4).encode)(x)

    def decode(code):
        return Quantize(2).decode(code)

    for transformed in (
        jax.jit(decode),
        jax.vmap(decode),
        lambda code: jax.lax.scan(lambda carry, code: (carry, decode(code)), 0, code),
        lambda code: Offload(Quantize(2)).decode(code),
    ):
        with pytest.raises(ValueError, match=message):
            transformed(code)
    # Where the code waits makes no difference.
    both = [codec.decode(Quantize(4).encode(x)) for codec in (Quantize(4), Offload(Quantize(4)))]
    np.testing.assert_array_equal(*both)
    np.testing.assert_array_equal(Quantize(4).decode(Offload(Quantize(4)).encode(x)), both[0])


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
