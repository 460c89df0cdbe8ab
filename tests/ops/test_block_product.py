"""Weight gradients that are made of blocks are those of the decoded matrix."""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest

from jaxcomp import BlockSparse, memory, ops
from jaxcomp.ops import _block_product as block_product
from jaxcomp.ops import _block_tpu as block_tpu
from tests.helpers import (
    DTYPES,
    assert_close,
    check_bilinear,
    collectives,
    kept,
    normal,
    replicate,
    shard,
    slow,
    without_type_checks,
)

CASES = {  # shape, columns, block
    "blocks that do not fit": ((3, 20, 36), 24, 8),
    "no tokens": ((5, 64), 7, (8, 16)),
    "a map": ((2, 3, 5, 16), 70, (4, 2)),
    "more than a tile": ((2, 50, 80), 96, 16),
}
SMALL = {"rows": 4, "tpu": (4, 8)}  # a small block for each product


def linear(x, w, codec):
    return ops.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())), codec=codec)


@pytest.mark.parametrize(
    ("product", "case"),
    kept(
        itertools.product(SMALL, CASES),
        [
            *(("tpu", case) for case in CASES),
            *(("rows", case) for case in ("blocks that do not fit", "a map")),
        ],
    ),
)
def test_gradients_are_those_of_the_decoded_matrix(case, product):
    shape, columns, block = CASES[case]
    if product == "tpu" and case == "a map":
        block = (6, 8)
    codec = BlockSparse(block, 0.5, product=product)
    x, w = normal(shape), normal((shape[-1], columns), seed=1)
    op, stock = functools.partial(linear, codec=codec), functools.partial(linear, codec=None)
    decoded = jax.jit(lambda x: codec.decode(codec.encode(x)))(x)
    check_bilinear(op, stock, x, w, decoded)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("product", SMALL)
def test_narrow_floats(product, dtype):
    """Sums are in float32, so that the result is rounded once."""
    codec = BlockSparse(SMALL[product], 0.5, product=product)
    x, g = normal((4, 30, 24), dtype), normal((4, 30, 10), dtype, 1)
    code = codec.encode(x)
    got = jax.jit(functools.partial(block_product.GRADIENTS[product], codec))(code, g)
    assert got.dtype == jnp.float32
    decoded = codec.decode(code).astype(jnp.float32)
    assert_close(got, jnp.einsum("btc,btn->cn", decoded, g.astype(jnp.float32)), 1e-5)


@pytest.mark.parametrize("product", SMALL)
def test_precision_is_the_products_own(product):
    x, w = normal((2, 8, 16)), normal((16, 5), seed=1)
    codec = BlockSparse(SMALL[product], 0.5, product=product)
    numbers = (((2,), (0,)), ((), ()))

    def loss(w):
        return ops.dot_general(x, w, numbers, jax.lax.Precision.HIGHEST, codec=codec).sum()

    text = str(jax.make_jaxpr(jax.grad(loss))(w))
    assert text.count("dot_general[") == text.count("Precision.HIGHEST, Precision.HIGHEST") > 1


def test_the_kernel_has_no_derivative():
    x, w = normal((2, 8, 16)), normal((16, 5), seed=1)
    codec = BlockSparse(SMALL["tpu"], 0.5, product="tpu")
    gradient = jax.grad(lambda w: (linear(x, w, codec) ** 2).sum())
    with pytest.raises(NotImplementedError, match="second derivatives"):
        jax.jvp(gradient, (w,), (w,))


def test_columns_take_turns_on_a_chip(monkeypatch):
    codec = BlockSparse((8, 8), 0.5, product="tpu")
    x, g = normal((3, 20, 48)), normal((3, 20, 300), seed=1)
    monkeypatch.setattr(block_tpu, "VMEM_NBYTES", block_tpu._nbytes(codec.grid(x.shape)))
    code = codec.encode(x)
    got = jax.jit(functools.partial(block_tpu.by_tpu, codec))(code, g)
    assert_close(got, jnp.einsum("btc,btn->cn", codec.decode(code), g), 1e-5)


def test_nothing_to_multiply():
    for product, gradient in block_product.GRADIENTS.items():
        codec = BlockSparse(SMALL.get(product, 4), 0.5, product=product)
        code = codec.encode(jnp.zeros((2, 0, 16)))
        assert gradient(codec, code, jnp.zeros((2, 0, 5))).tolist() == [[0.0] * 5] * 16


def test_tall_blocks_are_multiplied_as_they_are():
    """FLOPs of the product fall by the density, and nothing of the dense matrix's size is made."""
    x, w = normal((2, 64, 256)), normal((256, 8), seed=1)
    codec = BlockSparse((64, 8), 0.25)
    gradient = jax.grad(lambda w, codec: (linear(x, w, codec) ** 2).sum())
    auto, dense = (
        jax.jit(functools.partial(gradient, codec=c)).trace(w).jaxpr
        for c in (codec, BlockSparse((64, 8), 0.25, product="dense"))
    )
    assert block_product.choose(codec, x.shape, 8, 4) == "rows"
    assert block_product.choose(codec, x.shape, 256, 4) == "dense"
    text = str(auto)
    assert str(dense).count("f32[2,64,256]") > text.count("f32[2,64,256]")


@pytest.mark.aot
def test_the_kernel_compiles_for_an_absent_tpu():
    """It takes fewer FLOPs than the product of the decoded matrix, compiled for a CPU."""
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in [(4, 64, 128), (128, 64)])

    def flops(product, target):
        codec = BlockSparse(8, 0.25, product=product)
        gradient = jax.grad(lambda w, x: jnp.sin(linear(x, w, codec).astype(jnp.float32)).sum())
        return memory.analyze(gradient, w, x, target=target).flops

    assert flops("tpu", "v5e") < flops("dense", "cpu")


def test_vmap_of_grad_equals_a_loop():
    x, w = normal((3, 4, 10, 16)), normal((16, 5), seed=1)
    for product, block in SMALL.items():
        codec = BlockSparse(block, 0.5, product=product)
        gradient = jax.grad(lambda x, w, codec=codec: jnp.sin(linear(x, w, codec)).sum(), (0, 1))
        batched = jax.jit(jax.vmap(gradient, (0, None)))(x, w)
        alone = jax.jit(gradient)
        for i in range(3):
            assert_close(jax.tree.map(lambda g, i=i: g[i], batched), alone(x[i], w))


@pytest.mark.parametrize(
    ("samples", "product"),
    [
        (16, "auto"),
        (12, "rows"),
        *(slow(16, product) for product in ("dense", "rows")),
        *(slow(12, product) for product in ("auto", "dense")),
    ],
)
def test_a_spread_batch_is_summed_at_the_end(product, samples):
    codec = BlockSparse((8, 8), 0.5, product=product)
    x, w = normal((16, 8, 16)), normal((16, 5), seed=1)
    gradient = jax.jit(jax.grad(lambda w, x: (linear(x[:samples], w, codec) ** 2).sum()))
    if samples == 16:
        assert collectives(gradient, replicate(w), shard(x)) == {"all-reduce"}
    assert_close(gradient(replicate(w), shard(x)), gradient(w, x), 1e-5)


@pytest.mark.aot
def test_a_tpu_takes_its_kernel():
    shapes = (4, 64, 128), (128, 64)
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)

    def flops(product, block):
        codec = BlockSparse(block, 0.25, product=product)
        gradient = jax.grad(lambda w, x: jnp.sin(linear(x, w, codec).astype(jnp.float32)).sum())
        return memory.analyze(gradient, w, x, target="v5e").flops

    assert flops("auto", 8) == flops("tpu", 8) < flops("dense", 8)
    assert flops("auto", 4) == flops("dense", 4)  # which the kernel does not know


def kernels_of_the_program(fn, *args):
    """Pallas kernels in what a TPU's compiler is given."""
    exported = jax.export.export(
        jax.jit(fn),
        platforms=["tpu"],
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("tpu_custom_call")],
    )(*args)
    return exported.mlir_module().count("tpu_custom_call")


@pytest.mark.parametrize("check_vma", [True, slow(False)])
def test_several_tpus_take_the_kernel_inside_shard_map_alone(check_vma):
    codec = BlockSparse((8, 8), 0.5)
    w, x = normal((16, 128), seed=1), normal((16, 8, 16))
    spread = replicate(w), shard(x)
    gradient = jax.grad(lambda w, x: (linear(x, w, codec) ** 2).sum())
    assert kernels_of_the_program(gradient, w, x) == 1
    assert kernels_of_the_program(gradient, *spread) == 0
    assert memory.analyze(gradient, *spread, target="v5e:4x2").flops > 0

    def of_a_part(w, x):
        part = gradient(w, x)
        return part if check_vma else jax.lax.psum(part, "batch")

    specs = {"in_specs": (jax.P(), jax.P("batch")), "out_specs": jax.P()}
    by_hand = jax.shard_map(of_a_part, mesh=spread[1].sharding.mesh, **specs, check_vma=check_vma)
    assert kernels_of_the_program(by_hand, *spread) == 1
    assert_close(jax.jit(by_hand)(*spread), jax.jit(gradient)(w, x), 1e-5)


def test_the_default_has_second_derivatives_of_a_weight():
    x, w = normal((4, 8, 16)), normal((16, 5), seed=1)

    def product(codec):
        gradient = jax.grad(lambda w: jnp.sin(linear(x, w, codec)).sum())
        return jax.jit(lambda w: jax.jvp(gradient, (w,), (w,))[1])(w)

    dense = BlockSparse((8, 8), 0.5, product="dense")
    assert_close(product(BlockSparse((8, 8), 0.5)), product(dense), 1e-5)


def test_a_tpu_takes_its_kernel_with_numbers_of_64_bits():
    with jax.enable_x64():
        x, w = normal((4, 8, 16)), normal((16, 128), seed=1)
        gradient = jax.grad(lambda w, x: (linear(x, w, BlockSparse((8, 8), 0.5)) ** 2).sum())
        assert memory.analyze(gradient, w, x, target="v5e").flops > 0


def test_kernel_that_cannot_be_is_an_error():
    x, w = normal((2, 12, 16)), normal((16, 5), seed=1)
    with pytest.raises(ValueError, match=r"product='tpu': expected blocks whose width .* \(8, 4\)"):
        linear(x, w, BlockSparse((8, 4), 0.5, product="tpu"))
    x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in [(2, 64, 16384), (16384, 8)])
    with pytest.raises(ValueError, match=r"product='tpu': x of shape \(2, 64, 16384\) needs"):
        jax.eval_shape(lambda x, w: linear(x, w, BlockSparse((64, 8), 0.25, product="tpu")), x, w)
    with without_type_checks(), pytest.raises(ValueError, match="product='triton': expected"):
        BlockSparse(product="triton")


def test_a_map_that_is_too_large_for_the_chip_is_told_its_bytes():
    # A row of blocks of 8 x 8 at half density: sums of 2^20 columns and the products of half of
    # them, each for 128 columns of the cotangent; two copies of a row of data.
    codec, width = BlockSparse((8, 8), 0.5, product="tpu"), 2**20
    kept = width // 2
    nbytes = 4 * (2 * width * 128 + kept * 128 + 2 * 8 * (kept + 128))
    assert f" {nbytes} bytes on the chip" in block_tpu.refusal(codec, (1, 8, width))
