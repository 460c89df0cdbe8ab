"""A kernel's gradient is reordered where it may be, and a product's operand not at all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxcomp as jc
from jaxcomp import memory, ops
from jaxcomp._core.layouts import row_major_on_one_gpu
from jaxcomp.memory._compiling import compile_step
from jaxcomp.memory._targets import resolve
from jaxcomp.memory._tracing import trace
from jaxcomp.ops._row_major import row_major
from tests.helpers import normal, shard

SHAPE = (3, 3, 8, 16)


def reshapes(platform, gradient):
    """Whether a platform's compiler is given a reshape of it to one axis."""
    program = jax.export.export(jax.jit(row_major), platforms=[platform])(gradient)
    return "tensor<1152xf32>" in program.mlir_module()


def test_it_is_the_same_array():
    x = normal(SHAPE)
    for function in (row_major, jax.jit(row_major), jax.jit(jax.vmap(row_major))):
        np.testing.assert_array_equal(function(x), x)
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: (row_major(x) ** 2).sum()))(x), 2 * x)


def test_one_gpu_is_given_one_order_and_nobody_else():
    x = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    assert reshapes("cuda", x)
    assert not reshapes("cpu", x)
    assert not reshapes("tpu", x)


def test_several_gpus_keep_what_is_spread_where_it_is():
    spread = shard(jnp.ones((8, 1, 9, 16)))
    program = jax.export.export(jax.jit(row_major), platforms=["cuda"])(spread)
    assert "tensor<1152xf32>" not in program.mlir_module()


@pytest.mark.aot
def test_the_step_after_a_convolution_copies_less():
    x = jax.ShapeDtypeStruct((8, 16, 16, 64), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((3, 3, 64, 64), jnp.float32)

    def step(w, m, x, reorder):
        def loss(w):
            layout = ("NHWC", "HWIO", "NHWC")
            y = lax.conv_general_dilated(x, w, (1, 1), "SAME", None, None, layout)
            return jnp.sin(y.astype(jnp.float32)).sum()

        gradient = jax.grad(loss)(w.astype(x.dtype))
        gradient = row_major(gradient) if reorder else lax.optimization_barrier(gradient)
        m = 0.9 * m + gradient.astype(jnp.float32)
        return w - 0.1 * m, m

    def traffic(reorder):
        report = memory.analyze(
            lambda w, m, x: step(w, m, x, reorder), w, w, x, target="h100", donate_argnums=(0, 1)
        )
        return report.hbm_traffic_bytes

    assert traffic(True) < traffic(False)


def constrained(program, *args, platform="cuda"):
    """Whether a platform's compiler is given a layout that it has to take."""
    checks = [jax.export.DisabledSafetyCheck.custom_call("LayoutConstraint")]
    exported = jax.export.export(jax.jit(program), platforms=[platform], disabled_checks=checks)
    return "@LayoutConstraint" in exported(*args).mlir_module()


def test_an_operand_is_the_same_array():
    x = normal((2, 3, 4, 8))
    for function in (row_major_on_one_gpu, jax.jit(row_major_on_one_gpu)):
        np.testing.assert_array_equal(function(x), x)


def test_one_gpu_has_to_keep_feature_maps_in_row_major_order_and_nobody_else():
    x = jax.ShapeDtypeStruct((8, 4, 4, 16), jnp.float32)
    assert constrained(row_major_on_one_gpu, x)
    assert constrained(jax.vmap(row_major_on_one_gpu), jax.ShapeDtypeStruct((2, *x.shape), x.dtype))
    assert not constrained(row_major_on_one_gpu, x, platform="cpu")
    assert not constrained(row_major_on_one_gpu, x, platform="tpu")
    assert not constrained(row_major_on_one_gpu, shard(jnp.ones((8, 4, 4, 16))))


def conv(x, kernel, of=lax.conv_general_dilated, **options):
    layout = ("NHWC", "HWIO", "NHWC")
    return of(x, kernel, (2, 2), "VALID", dimension_numbers=layout, **options)


def by_layers(codec):
    """Linear layers, and a convolution that reads as many channels as the second of them."""

    def dense(x, kernel):
        return ops.dot_general(x, kernel, (((3,), (0,)), ((), ())), codec=codec)

    def loss(w, x):
        x = x + dense(ops.gelu(dense(x, w["up"]), codec=codec), w["down"])
        x = jnp.tanh(conv(x, w["in"]))
        return conv(x, w["out"], ops.conv_general_dilated, codec=codec).sum()

    return loss


def by_engine(codec):
    """The same program by `checkpoint`."""

    def loss(w, x):
        x = x + jax.nn.gelu(x @ w["up"]) @ w["down"]
        return conv(jnp.tanh(conv(x, w["in"])), w["out"]).sum()

    return jc.checkpoint(loss, jc.recipes.everywhere(codec))


def arguments(edge):
    w = {"up": (16, 32), "down": (32, 16), "in": (2, 2, 16, 32), "out": (2, 2, 32, 8)}
    w = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in w.items()}
    return w, jax.ShapeDtypeStruct((8, edge, edge, 16), jnp.bfloat16)


@pytest.mark.aot
@pytest.mark.parametrize("make", [by_layers, by_engine])
def test_a_product_of_a_compressed_map_of_odd_size_compiles_without_a_transposition(make):
    """XLA preferred the range's layout for the product too; in JAX 0.10 it then gave up."""
    step = trace(jax.grad(make(jc.Quantize(4))), *arguments(56))
    assert "[8,32,56,56]" not in compile_step(step, resolve("h100")).hlo_text
