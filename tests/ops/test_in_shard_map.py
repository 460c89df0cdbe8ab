"""Operations inside of `jax.shard_map` as JAX has it by default, checking what varies."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding

from jaxcomp import AvgPool, BlockSparse, DualPrecision, Exact, Offload, Quantize, SignAware, ops
from tests.helpers import assert_close, normal, slow

AUTO = jax.sharding.AxisType.Auto
DEVICES = 8
MESH = jax.make_mesh((DEVICES,), ("batch",), axis_types=(AUTO,))
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


def statistics(codec, x, scale, bias, axis_name):
    """Means and variances, whose types do not vary, beside a value whose type does."""
    y, means, variances = ops.norm_act(x, scale, bias, axis_name=axis_name, codec=codec)
    return ops.value(y) * (jnp.sin(means[0]) * jnp.cos(variances[0]))[None, None, None]


def check(operation, *parameters, **options):
    """Gradients of a loss over all devices, taken inside and outside, beside those of lanes."""
    specs = (jax.P("batch"), *[jax.P()] * len(parameters))
    arguments = tuple(range(len(specs)))

    def lane(x, *parameters):
        y = operation(x, *parameters, **options)
        return jnp.sum(jnp.sin(y.astype(jnp.float32)))

    def local(*given):
        return lax.psum(lane(*given), "batch")

    mapped = functools.partial(jax.shard_map, mesh=MESH, in_specs=specs)
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
        slow(conv, DualPrecision(), (KERNEL,)),
        (conv, AvgPool(), (KERNEL[:1, :1],)),
        (dense, Quantize(bits=2), (WEIGHT,)),
        (scaled, BlockSparse((8, 8), 0.5), (WEIGHT, BIAS, SCALE)),
        slow(affine, Quantize(bits=3), (SCALE, BIAS)),
        (norm, Quantize(bits=2), (SCALE, BIAS)),
    ],
)
def test_parameters_are_the_same_on_all_devices(operation, codec, parameters):
    check(functools.partial(operation, codec), *parameters)


@pytest.mark.parametrize(
    ("codec", "axis_name"),
    [
        slow(SignAware(2), None),
        (SignAware(3, scale_source="range"), "batch"),
        slow(SignAware(4), "batch"),
    ],
)
def test_a_unit_and_a_residual_sum(codec, axis_name):
    check(functools.partial(unit, codec), KERNEL[:1, :1], SCALE, BIAS, axis_name=axis_name)


@pytest.mark.parametrize("codec", [slow(SignAware(4)), Offload(SignAware(4))], ids=lambda c: c.name)
def test_a_pool_after_a_norm(codec):
    check(functools.partial(pooled, codec), SCALE, BIAS)


def test_statistics_gradients_are_counted_once():
    check(functools.partial(statistics, SignAware(4)), SCALE, BIAS, axis_name="batch")


@pytest.mark.parametrize(
    ("operation", "codec", "parameter"),
    [
        (conv, AvgPool(), KERNEL[:1, :1]),
        (dense, Quantize(bits=2), WEIGHT),
        (affine, Exact(), SCALE),
    ],
)
def test_a_mesh_of_which_one_axis_is_manual(operation, codec, parameter):
    mesh = jax.make_mesh((DEVICES, 1), ("batch", "rest"), axis_types=(AUTO, AUTO))

    def local(parameter, x):
        extra = (BIAS,) if operation is affine else ()
        return jnp.sin(operation(codec, x, parameter, *extra)).sum()

    def loss(parameter, x):
        return lax.psum(local(parameter, x), "batch")

    options = {"in_specs": (jax.P(), jax.P("batch")), "out_specs": jax.P()}
    mapped = jax.shard_map(jax.grad(loss), mesh=mesh, **options, axis_names={"batch"})
    lanes = jax.jit(jax.vmap(jax.grad(local), (None, 0)))
    expected = lanes(parameter, X.reshape(DEVICES, -1, *X.shape[1:])).sum(0)
    assert_close(jax.jit(mapped)(parameter, X), expected, 1e-5)


@pytest.mark.parametrize("kind", [slow(ops.batch_norm), ops.layer_norm])
def test_a_norm_s_scale_may_vary_where_its_input_does_not(kind):
    """And a sink that is made on the spot varies nowhere."""
    mesh = jax.make_mesh((4, 2), ("batch", "model"), axis_types=(AUTO, AUTO))
    scales = jnp.concatenate([SCALE, 2 * SCALE])

    def local(x, scale, sink):
        y = kind(x, scale, BIAS, codec=Quantize(bits=8), sink=sink)
        return jnp.sin(y[0] if kind is ops.batch_norm else y).sum()

    def part(x, scale):
        def loss(*given):
            return lax.psum(local(*given), ("batch", "model"))

        return jax.grad(loss, (0, 1, 2))(x, scale, jnp.ones((len(x), 6)))

    specs = jax.P("batch"), jax.P("model")
    mapped = jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=(*specs, jax.P()))
    found = jax.jit(mapped)(X, scales)
    of_scale = jax.vmap(jax.grad(local, (0, 1, 2)), (None, 0, None))
    of_all = jax.vmap(of_scale, (0, None, None))
    parts = X.reshape(4, -1, *X.shape[1:]), scales.reshape(2, -1), jnp.ones((4, 6))
    dx, dscale, dsink = jax.jit(of_all)(*parts)
    expected = dx.sum(1).reshape(X.shape), dscale.sum(0).reshape(-1), dsink.sum((0, 1))
    assert_close(found, expected, 1e-5)


def test_a_device_s_own_dropout_of_what_all_devices_have():

    def loss(x):
        key = jax.random.fold_in(jax.random.key(0), lax.axis_index("batch"))
        return lax.psum(ops.dropout(x, key, 0.5).sum(), "batch")

    found = jax.jit(jax.shard_map(jax.grad(loss), mesh=MESH, in_specs=jax.P(), out_specs=jax.P()))
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(0), i))(jnp.arange(DEVICES))
    lanes = jax.vmap(jax.grad(lambda x, key: ops.dropout(x, key, 0.5).sum()), (None, 0))
    assert_close(found(X), jax.jit(lanes)(X, keys).sum(0))


def test_the_kernel_of_blocks_is_lowered():
    """Of a device that is there; elsewhere Pallas interprets it, which checks no types."""
    if jax.__version_info__ < (0, 10, 2):
        pytest.skip("JAX before 0.10.2 has no devices of a platform that is not there")
    codec = BlockSparse((8, 8), 0.5, product="tpu")
    device = AbstractDevice("TPU v5e", None, "tpu")
    mesh = AbstractMesh(MESH.axis_sizes, MESH.axis_names, abstract_device=device)

    def loss(weight, x):
        return lax.psum(jnp.sin(dense(codec, x, weight)).sum(), "batch")

    def of_shape(x, spec):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    specs = {"in_specs": (jax.P(), jax.P("batch")), "out_specs": jax.P()}
    program = jax.export.export(
        jax.jit(jax.shard_map(jax.grad(loss), mesh=mesh, **specs)),
        platforms=["tpu"],
        disabled_checks=[
            jax.export.DisabledSafetyCheck.custom_call(name)
            for name in ("tpu_custom_call", "LayoutConstraint")
        ],
    )(of_shape(WEIGHT, jax.P()), of_shape(X, jax.P("batch")))
    assert "tpu_custom_call" in program.mlir_module()


def test_a_frozen_batch():
    """Nothing of the batch is differentiated, and the parameter's gradient is summed up."""

    def loss(weight, x):
        return lax.psum(jnp.sin(dense(Quantize(bits=4), x, weight)).sum(), "batch")

    specs = {"in_specs": (jax.P(), jax.P("batch")), "out_specs": jax.P()}
    found = jax.jit(jax.shard_map(jax.grad(loss), mesh=MESH, **specs))(WEIGHT, X)
    whole = jax.jit(jax.grad(lambda w: jnp.sin(dense(Exact(), X, w)).sum()))(WEIGHT)
    assert_close(found, whole, 0.2)
