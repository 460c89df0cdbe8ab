"""Operations inside of `jax.shard_map` as JAX has it by default, checking what varies."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxcomp import AvgPool, BlockSparse, DualPrecision, Exact, Quantize, SignAware, ops
from tests.helpers import assert_close, normal

DEVICES = 8
X = normal((16, 4, 4, 16))
KERNEL, WEIGHT = normal((3, 3, 16, 16), seed=1), normal((16, 16), seed=2)
SCALE, BIAS = normal((16,), seed=3), normal((16,), seed=4)


def conv(codec, x, kernel):
    layout = ("NHWC", "HWIO", "NHWC")
    return ops.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=layout, codec=codec
    )


def dense(codec, x, weight):
    return ops.dot_general(x, weight, (((3,), (0,)), ((), ())), codec=codec)


def scaled(codec, x, weight, bias, scale):
    return ops.scaled_linear(x, weight, bias, scale, codec=codec)


def affine(codec, x, scale, bias):
    return ops.affine(x, scale, bias, codec=codec)


def norm(codec, x, scale, bias, axis_name=None):
    return ops.batch_norm(x, scale, bias, axis_name=axis_name, codec=codec)[0]


def unit(codec, x, kernel, scale, bias, axis_name=None):
    """A norm with a ReLU, its sum with another, and a convolution that reads the sum's code."""
    y, *_ = ops.norm_act(x, scale, bias, axis_name=axis_name, codec=codec)
    y, *_ = ops.norm_act(x, bias, scale, y, axis_name=axis_name, codec=codec)
    return conv(None, y, kernel)


def pooled(codec, x, scale, bias):
    pool = (3, 3), (2, 2), "SAME"
    return ops.value(ops.norm_act(x, scale, bias, pool=pool, codec=codec)[0])


def check(operation, *parameters, **options):
    """Gradients of a loss over all devices, taken inside and outside, beside those of lanes."""
    mesh = jax.make_mesh((DEVICES,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = (jax.P("batch"), *[jax.P()] * len(parameters))
    arguments = tuple(range(len(specs)))

    def lane(x, *parameters):
        y = operation(x, *parameters, **options)
        return jnp.sum(jnp.sin(y.astype(jnp.float32)))

    def local(*given):
        return lax.psum(lane(*given), "batch")

    mapped = functools.partial(jax.shard_map, mesh=mesh, in_specs=specs)
    outside = jax.grad(mapped(local, out_specs=jax.P()), arguments)
    inside = mapped(jax.grad(local, arguments), out_specs=specs)
    lanes = jax.vmap(jax.grad(lane, arguments), (0, *[None] * len(parameters)), axis_name="batch")
    dx, *rest = jax.jit(lanes)(X.reshape(DEVICES, -1, *X.shape[1:]), *parameters)
    expected = dx.reshape(X.shape), *(a.sum(0) for a in rest)
    for found in (outside, inside):
        assert_close(jax.jit(found)(X, *parameters), expected, 1e-5)


@pytest.mark.parametrize(
    ("operation", "codec", "parameters"),
    [
        (conv, DualPrecision(), (KERNEL,)),
        (conv, AvgPool(), (KERNEL[:1, :1],)),
        (dense, Quantize(bits=2), (WEIGHT,)),
        (scaled, BlockSparse((8, 8), 0.5), (WEIGHT, BIAS, SCALE)),
        (affine, Quantize(bits=3), (SCALE, BIAS)),
        (norm, Quantize(bits=2), (SCALE, BIAS)),
    ],
)
def test_parameters_are_the_same_on_all_devices(operation, codec, parameters):
    check(functools.partial(operation, codec), *parameters)


@pytest.mark.parametrize(
    ("codec", "axis_name"),
    [(SignAware(2), None), (SignAware(4), "batch"), (SignAware(3, unit="range"), "batch")],
)
def test_a_unit_and_a_residual_sum(codec, axis_name):
    check(functools.partial(unit, codec), KERNEL[:1, :1], SCALE, BIAS, axis_name=axis_name)


def test_a_pool_after_a_norm():
    check(functools.partial(pooled, SignAware(4)), SCALE, BIAS)


def test_a_frozen_batch():
    """Nothing of the batch is differentiated, and the parameter's gradient is summed up."""
    mesh = jax.make_mesh((DEVICES,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(weight, x):
        return lax.psum(jnp.sin(dense(Quantize(bits=4), x, weight)).sum(), "batch")

    specs = {"in_specs": (jax.P(), jax.P("batch")), "out_specs": jax.P()}
    found = jax.jit(jax.shard_map(jax.grad(loss), mesh=mesh, **specs))(WEIGHT, X)
    whole = jax.grad(lambda w: jnp.sin(dense(Exact(), X, w)).sum())(WEIGHT)
    assert_close(found, whole, 0.2)
