"""Kernels of rows of channels compute what their functions do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxcomp._core import row_kernels
from jaxcomp._core.row_kernels import by_row_kernel
from jaxcomp.codecs import packing
from jaxcomp.memory._compiling import compile_step
from jaxcomp.memory._targets import resolve
from jaxcomp.memory._tracing import trace
from tests.helpers import AS_WRITTEN, DTYPES, assert_close, assert_same_bits, normal

needs_older = pytest.mark.skipif(
    jax.__version_info__ >= (0, 11), reason="it asks for the GPU that Pallas lowers for"
)


def everything(x, other, codes, channel, sample, row, position, salt, bits=4):
    """Reads arrays of all kinds, and returns values, codes, a small array and sums."""
    index = lax.iota(jnp.uint32, x.size).reshape(x.shape) ^ salt
    wide = x.astype(jnp.float32) - channel
    y = jnp.maximum((wide * sample + row).astype(x.dtype) + other, 0)
    unpacked = packing.unpack(codes, x.shape, bits)
    mixed = jnp.where(unpacked > 3, wide, position) + (index >> 28).astype(jnp.float32)
    made = packing.pack(unpacked + jnp.where(y > 0, 1, 2), bits)
    return {"y": y, "codes": made, "small": channel * 2, "sums": (mixed.sum((0, 1)),)}


@pytest.mark.parametrize(
    ("dtype", "bits"), [*((dtype, 4) for dtype in DTYPES), *((jnp.bfloat16, b) for b in (2, 3, 8))]
)
@pytest.mark.parametrize("shape", [(4, 64, 64), (3, 77, 48), (2, 2100, 16)])
def test_it_computes_the_function(launched_kernels, shape, dtype, bits):
    samples, rows, channels = shape
    arguments = (
        normal(shape, dtype),
        normal(shape, dtype, 1),
        packing.pack(jnp.arange(np.prod(shape)).reshape(shape) * 7, bits),
        normal((1, 1, channels), seed=2),
        2.0 ** jnp.round(normal((samples, 1, channels), seed=3)),  # exact, if it is fused or not
        normal((samples, rows, 1), seed=4),
        normal((1, rows, 1), seed=5),
        jnp.uint32(2**31 + 12345),
    )
    of_bits = functools.partial(everything, bits=bits)
    expected = of_bits(*arguments)
    function = by_row_kernel(of_bits, exact=True)
    made = jax.jit(function, compiler_options=AS_WRITTEN)(*arguments)
    (kernel,) = launched_kernels
    assert kernel.overlaps == (rows % kernel.height != 0)
    sums, others = made.pop("sums"), expected.pop("sums")
    assert_same_bits(made, expected)
    assert_close(sums, others, rtol=1e-6)


@settings(deadline=None, max_examples=8)
@given(st.integers(1, 700), st.integers(1, 24), st.booleans())
def test_any_number_of_rows_and_channels(rows, sixteenths, by_sample):
    """Those with few rows are left to XLA."""
    x = normal((3, rows, 16 * sixteenths), jnp.bfloat16)
    small = normal((3 if by_sample else 1, 1, x.shape[-1]), seed=1)

    def scaled(x, small):
        wide = x.astype(jnp.float32) * small
        return wide.astype(x.dtype), wide.sum((0, 1))

    launched = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_kernels, "INTERPRET", True)
        patch.setattr(row_kernels, "on_one", lambda _, form, __: launched.append(1) or form)
        y, sums = by_row_kernel(scaled, exact=True)(x, small)
    assert launched or 3 * rows * 64 < 8 * 128 * 4 or by_sample
    assert_same_bits(y, scaled(x, small)[0])
    assert_close(sums, scaled(x, small)[1])


def test_lanes_of_vmap(launched_kernels):
    x, small = normal((3, 2, 80, 64), jnp.bfloat16), normal((3, 1, 1, 64), seed=1)

    def scaled(x, small):
        return x.astype(jnp.float32) * small, x.astype(jnp.float32).sum((0, 1))

    made = jax.vmap(by_row_kernel(scaled, exact=True))(x, small)
    assert launched_kernels
    assert_close(made, jax.vmap(scaled)(x, small), rtol=1e-6)


def test_devices_of_shard_map(launched_kernels):
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
    x, small = normal((16, 80, 64), jnp.bfloat16), normal((1, 1, 64), seed=1)

    def scaled(x, small):
        return x.astype(jnp.float32) * small, x.astype(jnp.float32).sum((0, 1))

    def of_device(x, small):
        y, total = by_row_kernel(scaled, exact=True)(x, small)
        return y, lax.psum(total, "data")

    by_device, everywhere = PartitionSpec("data"), PartitionSpec()
    specs = {"in_specs": (by_device, everywhere), "out_specs": (by_device, everywhere)}
    mapped = jax.shard_map(of_device, mesh=mesh, **specs, check_vma=False)  # Pallas' interpreter
    made = jax.jit(mapped)(x, small)
    assert launched_kernels
    assert_close(made, scaled(x, small), rtol=1e-6)


def test_nans_stay(launched_kernels):
    x = normal((2, 80, 64)).at[0, 3, 5].set(jnp.nan).at[1, 2, 7].set(-jnp.inf)
    y = by_row_kernel(lambda x, s: jnp.maximum(x * s, 0), exact=True)(x, jnp.ones((1, 1, 64)))
    assert launched_kernels
    assert_same_bits(y, jnp.maximum(x, 0))


def test_derivatives_and_calls_without_jit_are_those_of_the_function():
    x, scale = normal((2, 80, 64)), normal((1, 1, 64), seed=1)

    def loss(x, scale, wrap=lambda f: f):
        return (wrap(lambda x, s: jnp.maximum(x * s, 0))(x, scale) ** 2).sum()

    def by_kernel(x, scale):
        return loss(x, scale, lambda f: by_row_kernel(f, exact=True))

    assert_same_bits(jax.grad(by_kernel, (0, 1))(x, scale), jax.grad(loss, (0, 1))(x, scale))


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize(("dtype", "maximum"), [(jnp.float32, "f32"), (jnp.bfloat16, "bf16x2")])
@pytest.mark.parametrize("name", ["h100", "a100-40gb"])
def test_compiled_kernels_keep_nans_and_round_products(name, dtype, maximum, tmp_path):
    """No sum is fused with a product that a result with the bits of XLA follows from."""

    def relu(x, scale):
        y = jnp.maximum((x.astype(jnp.float32) * scale + scale).astype(x.dtype), 0)
        return y, y.astype(jnp.float32).sum((0, 1))

    target = resolve(name)
    shapes = jax.ShapeDtypeStruct((2, 96, 64), dtype), jax.ShapeDtypeStruct((1, 1, 64), jnp.float32)
    found = {}
    for exact in (True, False):
        step = trace(by_row_kernel(relu, exact=exact), *shapes, target=target)
        folder = tmp_path / str(exact)
        compile_step(step, target, dump_dir=folder)
        found[exact] = "".join(path.read_text() for path in folder.glob("*.ptx"))
    assert f"max.NaN.{maximum}" in found[True]
    assert "fma" not in found[True]
    assert "fma.rn.f32" in found[False]


def test_a_difference_of_a_product_and_a_constant_compiles():
    h100 = resolve("h100")
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 96, 64), (1, 1, 64))]
    for function in (lambda x, s: x * s - 0.5, lambda x, s: 0.5 - x * s):
        step = trace(by_row_kernel(function, exact=False), *shapes, target=h100)
        assert "triton" in compile_step(step, h100).hlo_text


@needs_older
@pytest.mark.parametrize(("devices", "mapped"), [(1, False), (8, False), (8, True)])
def test_programs_for_several_devices_have_kernels_in_shard_map_alone(devices, mapped):
    mesh = jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices])
    by_device, everywhere = PartitionSpec("data"), PartitionSpec()
    x = jax.ShapeDtypeStruct((16, 80, 64), jnp.float32, sharding=NamedSharding(mesh, by_device))
    function = by_row_kernel(lambda x, s: x * s, exact=True)
    if mapped:
        specs = {"in_specs": (by_device, everywhere), "out_specs": by_device}
        function = jax.shard_map(function, mesh=mesh, **specs)
    traced = jax.jit(function).trace(x, jax.ShapeDtypeStruct((1, 1, 64), jnp.float32))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("triton" in text) == (devices == 1 or mapped)
