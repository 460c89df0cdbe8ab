"""A kernel's gradient is reordered where it may be, and nowhere else."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp import memory
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
