"""The gradient of a 1x1 kernel from integers is that of the decoded input."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxcomp import Offload, SignAware, memory, ops
from jaxcomp.ops import _conv as conv
from tests.helpers import assert_close, collectives, normal, replicate, shard, slow

SHAPE = (4, 6, 6, 16)


def activation(codec, x=None, shape=SHAPE):
    x = jax.nn.relu(normal(shape)) if x is None else x
    channel_scale = jnp.linspace(0.1, 1.5, x.shape[-1])[None, None, None]
    return ops.encode_activation(x, channel_scale, codec)


def gradient(x, kernel, layout=("NHWC", "HWIO", "NHWC"), **options):
    options = {"window_strides": (1, 1), "padding": "SAME", **options}

    def loss(kernel):
        y = ops.conv_general_dilated(x, kernel, dimension_numbers=layout, **options)
        return jnp.sin(y.astype(jnp.float32)).sum()

    return jax.jit(jax.grad(loss))(kernel)


@pytest.mark.parametrize("bits", [slow(2), 3, 4])
def test_integers_times_their_unit_are_what_is_decoded(bits):
    x = activation(SignAware(bits=bits))
    multiples, channel_scale = x.codec.multiples(x.code)
    assert multiples.dtype == jnp.int8
    assert len(jnp.unique(multiples)) == 2**bits - 1  # two codes are zero
    *packed, _, scale, offset = x.code.arrays
    levels = dataclasses.replace(x.code, arrays=(*packed, None, scale, offset))
    assert_close(multiples * channel_scale, x.codec.decode(levels), 1e-6)


@pytest.mark.parametrize(
    ("layout", "shape", "options"),
    [
        (("NHWC", "HWIO", "NHWC"), (1, 1, 16, 24), {}),
        (("NHWC", "OIHW", "NCHW"), (24, 16, 1, 1), {}),
        (("NHWC", "IHWO", "NWHC"), (16, 1, 1, 24), {"window_strides": (2, 3)}),
        (("NHWC", "HWIO", "NHWC"), (1, 1, 4, 24), {"feature_group_count": 4}),
        (("NHWC", "HWIO", "NHWC"), (1, 1, 16, 24), {"batch_group_count": 2}),
    ],
)
@pytest.mark.parametrize(
    "codec", [slow(SignAware(bits=2)), SignAware(bits=4, scale_source="range")]
)
def test_on_a_gpu_it_is_the_gradient_at_the_decoded_input(layout, shape, options, codec, as_on):
    x, kernel = activation(codec), normal(shape, seed=1)
    expected = gradient(x, kernel, layout, **options)
    as_on("cuda")
    assert_close(gradient(x, kernel, layout, **options), expected, 1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, slow(jnp.float16)])
def test_in_half_precision(dtype, as_on):
    x = activation(SignAware(bits=4), jax.nn.relu(normal(SHAPE)).astype(dtype))
    kernel = normal((1, 1, 16, 8), seed=1).astype(dtype)
    expected = gradient(x, kernel)
    as_on("cuda")
    assert gradient(x, kernel).dtype == dtype
    assert_close(gradient(x, kernel), expected, 2e-2)


def test_nan_and_overflow_stay_visible(as_on):
    x = jax.nn.relu(normal(SHAPE))
    channel_scale = jnp.ones((1, 1, 1, 16)).at[..., 3].set(jnp.nan)
    as_on("cuda")
    got = gradient(
        ops.encode_activation(x, channel_scale, SignAware(bits=4)), normal((1, 1, 16, 8))
    )
    assert jnp.isnan(got[0, 0, 3]).all()
    assert jnp.isfinite(got).sum() == 15 * 8


@pytest.mark.parametrize("axis", [0, 1])
def test_of_a_spread_input_there_is_no_collective_but_the_sum(axis, as_on):
    as_on("cuda")
    kernel = normal((1, 1, 16, 8), seed=1)
    x = jax.nn.relu(normal((8, 8, 4, 16)))

    def run(kernel, x):
        x = jnp.swapaxes(x, 0, axis)
        return gradient(activation(SignAware(bits=4), x), kernel)

    assert collectives(run, replicate(kernel), shard(x)) == {"all-reduce"}


@pytest.mark.aot
@pytest.mark.parametrize("codec", [SignAware(bits=4), Offload(SignAware(bits=4))])
def test_an_h100_reads_the_integers_in_the_product(codec, monkeypatch):
    x = jax.ShapeDtypeStruct((64, 28, 28, 256), jnp.bfloat16)
    kernel = jax.ShapeDtypeStruct((1, 1, 256, 64), jnp.bfloat16)

    def traffic():
        report = memory.analyze(
            lambda kernel, x: gradient(activation(codec, jax.nn.relu(x)), kernel),
            kernel,
            x,
            target="h100",
        )
        print(f"h100, 1x1 convolution, {codec}: {report.hbm_traffic_bytes} bytes")
        return report.hbm_traffic_bytes

    of_integers = traffic()
    monkeypatch.setattr(conv, "kernel_gradient", lambda *args: None)
    assert of_integers < traffic() - x.size  # of twice as much, less the product's partial sums
