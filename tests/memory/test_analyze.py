import functools
from importlib import metadata

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxcomp import memory

FLOAT = 4


def installed(*wheels):
    names = {distribution.metadata["Name"] for distribution in metadata.distributions()}
    return not names.isdisjoint(wheels)


needs_gpu_compiler = pytest.mark.skipif(
    not installed("jax-cuda13-pjrt", "jax-cuda12-pjrt"), reason="needs jaxcomp[gpu-aot]"
)
needs_tpu_compiler = pytest.mark.skipif(not installed("libtpu"), reason="needs jaxcomp[tpu-aot]")


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def sgd(weights, x):
    """One step of a stack of tanh layers."""

    def loss(weights):
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return h.sum()

    return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))


def stack(layers, batch=512, width=64):
    return [struct(width, width) for _ in range(layers)], struct(batch, width)


def test_arguments_results_and_donation_are_exact():
    weights, x = stack(3)
    kept = memory.analyze(sgd, weights, x, target="cpu")
    donated = memory.analyze(sgd, weights, x, target="cpu", donate_argnums=0)
    parameters = 3 * 64 * 64 * FLOAT
    for report in (kept, donated):
        assert report.argument_bytes == parameters + 512 * 64 * FLOAT
        assert parameters <= report.output_bytes <= parameters + 64  # and a table of pointers
        assert report.total_bytes == (
            report.argument_bytes + report.output_bytes - report.alias_bytes + report.temp_bytes
        )
    assert kept.alias_bytes == 0
    assert donated.alias_bytes == parameters


def test_a_jitted_step_is_the_same_step():
    weights, x = stack(2)
    plain = memory.analyze(sgd, weights, x, target="cpu", donate_argnums=0).to_dict()
    jitted = memory.analyze(jax.jit(sgd, donate_argnums=0), weights, x, target="cpu").to_dict()
    assert plain | {"compile_seconds": 0} == jitted | {"compile_seconds": 0}


def test_temp_grows_by_what_each_layer_keeps():
    two, six = (memory.analyze(sgd, *stack(n), target="cpu") for n in (2, 6))
    assert six.temp_bytes - two.temp_bytes >= 4 * 512 * 64 * FLOAT


def test_remat_lowers_declared_bytes():
    def loss(block, weights, x):
        for w in weights:
            x = block(w, x)
        return x.sum()

    def block(w, x):
        return jnp.exp(jnp.sin(x @ w) @ w.T)

    weights, x = stack(4)
    plain, remat = (
        memory.analyze(jax.grad(functools.partial(loss, f)), weights, x, target="cpu")
        for f in (block, jax.checkpoint(block))
    )
    activation = 512 * 64 * FLOAT
    assert plain.declared_residual_bytes == 4 * 3 * activation  # sin, cos and exp of each block
    assert remat.declared_residual_bytes == 3 * activation  # the inputs of three blocks


def test_a_convolution():
    def loss(kernel, x):
        y = lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jax.nn.relu(y).sum()

    kernel, x = struct(3, 3, 8, 16), struct(4, 16, 16, 8)
    report = memory.analyze(jax.grad(loss), kernel, x, target="cpu")
    assert report.argument_bytes == (3 * 3 * 8 * 16 + 4 * 16 * 16 * 8) * FLOAT
    assert report.output_bytes == 3 * 3 * 8 * 16 * FLOAT
    assert report.declared_residual_bytes == 4 * 16 * 16 * 16  # the relu's mask
    assert report.flops > 0
    assert report.hbm_traffic_bytes > report.argument_bytes


def test_what_a_cpu_does_not_give():
    report = memory.analyze(jnp.sin, struct(8), target="cpu")
    assert report.peak_bytes is None
    assert report.capacity_bytes is None
    assert report.fits is None
    assert report.estimated_cycles is None
    assert "peak                not given by this backend" in str(report)


def test_capacity_says_what_fits():
    x = struct(1024)
    needed = memory.analyze(jnp.sin, x, target="cpu").total_bytes
    exact = memory.analyze(jnp.sin, x, target="cpu", capacity=needed)
    short = memory.analyze(jnp.sin, x, target="cpu", capacity=needed - 1)
    assert (exact.fits, exact.headroom_bytes) == (True, 0)
    assert (short.fits, short.headroom_bytes) == (False, -1)
    with pytest.raises(ValueError, match="capacity=0"):
        memory.analyze(jnp.sin, x, target="cpu", capacity=0)


def test_static_arguments():
    report = memory.analyze(lambda x, n: x[:n], struct(64), 8, target="cpu", static_argnums=1)
    assert report.output_bytes == 8 * FLOAT


def test_what_a_function_closes_over_is_shown():
    w = jnp.ones((64, 64))
    report = memory.analyze(lambda x: x @ w, struct(2, 64), target="cpu")
    assert report.constant_bytes == w.nbytes
    assert "constants           16.0 KiB" in str(report)
    inside = memory.analyze(lambda x: jax.jit(lambda y: y @ w)(x) @ w, struct(2, 64), target="cpu")
    assert inside.constant_bytes == w.nbytes


def test_a_partial_of_a_jitted_step_is_that_step():
    weights, x = stack(2)
    jitted = jax.jit(sgd, donate_argnums=0)
    expected = memory.analyze(jitted, weights, x, target="cpu")
    bound = memory.analyze(functools.partial(jitted, weights), x, target="cpu")
    assert bound.alias_bytes == expected.alias_bytes > 0
    assert bound.total_bytes == expected.total_bytes


def test_a_jitted_method_leaves_its_object_as_it_was():
    class Trainer(nnx.Module):
        def __init__(self):
            self.model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))

        @nnx.jit
        def step(self, x):
            return self.model(x).sum()

    trainer = Trainer()
    report = memory.analyze(trainer.step, jnp.ones((2, 8)), target="cpu")
    assert report.argument_bytes >= (8 * 4 + 4 + 2 * 8) * FLOAT
    trainer.step(jnp.ones((2, 8)))


def test_what_has_no_gradient_has_no_residuals():
    def decode(x):
        return lax.while_loop(lambda c: c.sum() < 3, lambda c: c + 1, x)

    report = memory.analyze(decode, struct(4), target="cpu")
    assert report.declared_residual_bytes is None
    assert "not differentiable" in str(report)


@needs_gpu_compiler
def test_a_callback_cannot_be_compiled_for_an_absent_device():
    def chatty(x):
        jax.debug.print("{}", x.sum())
        return x

    with pytest.raises(memory.CompileError, match="calls back to Python"):
        memory.analyze(chatty, struct(4), target="h100")


@pytest.mark.parametrize("capacity", [0, -1, 1.5, float("nan"), "8", "8Gi", "-1GiB"])
def test_a_capacity_that_is_no_number_of_bytes(capacity):
    with pytest.raises(Exception, match="capacity"):
        memory.analyze(jnp.sin, struct(4), target="cpu", capacity=capacity)


def test_a_step_that_does_not_trace_is_its_own_error():
    with pytest.raises(TypeError, match="dot_general"):
        memory.analyze(lambda a, b: a @ b, struct(2, 3), struct(2, 3), target="cpu")


def make_model():
    model = nnx.Linear(32, 32, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


def nnx_step(model, optimizer, x):
    optimizer.update(model, nnx.grad(lambda model: model(x).sum())(model))


@pytest.mark.parametrize("make", [make_model, lambda: nnx.eval_shape(make_model)])
def test_nnx_objects_and_what_the_step_changes_in_them(make):
    x = struct(16, 32)
    report = memory.analyze(nnx_step, *make(), x, target="cpu", donate_argnums=(0, 1))
    weights = 32 * 32 * FLOAT  # the gradient of a sum does not read bias or kernel values ...
    assert report.alias_bytes >= 2 * weights  # ... but kernel and momentum are updated in place
    assert report.argument_bytes >= 2 * weights + 16 * 32 * FLOAT
    jitted = nnx.jit(nnx_step, donate_argnums=(0, 1))
    assert memory.analyze(jitted, *make(), x, target="cpu").alias_bytes == report.alias_bytes


def test_nnx_objects_inside_of_an_argument():
    def step(state, x):
        nnx_step(*state, x)

    x = struct(16, 32)
    alone = memory.analyze(nnx_step, *make_model(), x, target="cpu")
    report = memory.analyze(step, make_model(), x, target="cpu")
    assert report.total_bytes == alone.total_bytes > 3 * 32 * 32 * FLOAT


@needs_gpu_compiler
def test_a_loop_whose_work_is_not_known_has_no_estimated_time():
    def loop(x):
        def more(carry):
            return carry[0] < 10

        return jax.lax.while_loop(more, lambda c: (c[0] + 1, jnp.tanh(c[1] @ c[1])), (0, x))[1]

    report = memory.analyze(loop, struct(64, 64), target="h100")
    assert (report.flops, report.estimated_seconds) == (None, None)
    assert "FLOPs               not known" in str(report)


@needs_gpu_compiler
def test_shardings_of_the_jit_alone():
    mesh = memory.mesh("h100:8", (8,), ("data",))
    split = jax.jit(jnp.sin, in_shardings=NamedSharding(mesh, PartitionSpec("data")))
    with pytest.raises(ValueError, match="no argument has a sharding"):
        memory.analyze(split, struct(64), target="h100:8")


@needs_gpu_compiler
def test_h100():
    weights, x = stack(2, batch=4096)
    report = memory.analyze(sgd, weights, x, target="h100", donate_argnums=0)
    assert report.target == "h100"
    assert report.argument_bytes == (2 * 64 * 64 + 4096 * 64) * FLOAT
    assert report.alias_bytes == 2 * 64 * 64 * FLOAT
    assert report.temp_bytes >= 4096 * 64 * FLOAT  # what the first layer hands to the second
    assert report.peak_bytes >= report.temp_bytes
    assert report.fits
    assert report.headroom_bytes == report.usable_bytes - report.total_bytes


@needs_gpu_compiler
def test_a_gpu_program_that_is_too_large_is_a_report():
    report = memory.analyze(jnp.negative, struct(8 * 2**30, dtype=jnp.int8), target="rtx3060-12gb")
    assert report.total_bytes == 16 * 2**30
    assert report.fits is False
    assert report.headroom_bytes == report.usable_bytes - 16 * 2**30


@needs_gpu_compiler
def test_data_parallel_figures_are_per_device():
    mesh = memory.mesh("h100:8", (8,), ("data",))
    weights, x = stack(1)
    everywhere, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))
    arguments = [w.update(sharding=everywhere) for w in weights], x.update(sharding=split)
    report = memory.analyze(sgd, *arguments, target="h100:8")
    assert report.argument_bytes == (64 * 64 + 512 * 64 // 8) * FLOAT


@needs_gpu_compiler
def test_several_devices_need_shardings_that_fit():
    weights, x = stack(1)
    with pytest.raises(ValueError, match="'h100:8' has 8 devices"):
        memory.analyze(sgd, weights, x, target="h100:8")
    split = NamedSharding(memory.mesh("h100:8", (8,), ("data",)), PartitionSpec("data"))
    with pytest.raises(ValueError, match=r"data.*divi"):
        memory.analyze(sgd, weights, struct(500, 64).update(sharding=split), target="h100:8")


@needs_tpu_compiler
def test_v5e():
    weights, x = stack(2, batch=128, width=128)
    report = memory.analyze(sgd, weights, x, target="v5e")
    assert report.argument_bytes == (2 * 128 * 128 + 128 * 128) * FLOAT
    assert report.estimated_cycles > 0
    assert report.fits


@needs_tpu_compiler
def test_a_tpu_program_that_is_too_large_is_a_report():
    report = memory.analyze(jnp.negative, struct(40 * 2**30, dtype=jnp.int8), target="v5e")
    assert report.total_bytes == 80 * 2**30
    assert report.fits is False
    assert report.temp_bytes is None
    assert report.compile_seconds is None


@needs_tpu_compiler
def test_what_a_tpu_compiler_refuses_does_not_fit_whatever_the_capacity():
    eighteen = struct(9 * 2**30, dtype=jnp.int8)
    report = memory.analyze(jnp.negative, eighteen, target="v5e", capacity=2**35)
    assert (report.fits, report.headroom_bytes) == (False, None)
