"""The forms of `norm_act` for one platform or another compute the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp import Offload, SignAware, ops
from jaxcomp._core import barriers, platforms
from tests.helpers import DTYPES, as_float, assert_close, assert_same_bits, normal, slow
from tests.ops.norm_act_cases import NHWC, SCALE_SOURCES, SHAPE, norm_act, of_case


@pytest.mark.parametrize(
    ("case", "bits"), [("relu", 2), ("relu", 4), ("added", 4), ("normed", 4), ("linear", 4)]
)
def test_the_form_for_a_tpu_makes_the_same_codes_and_gradients(case, bits, as_on):
    coded, given = of_case(functools.partial(norm_act, bits=bits), case)

    def run():
        y, pull = jax.vjp(lambda *a: coded(*a)[0].value, *given(jnp.bfloat16))
        return y, coded(*given(jnp.bfloat16)), pull(normal(y.shape, jnp.bfloat16, 9))

    expected = run()
    as_on("tpu")
    assert_same_bits(run(), expected)


STORED = [{}, {"signed": True}, {"offload": True}]


@pytest.mark.parametrize(
    ("case", "bits", "stored"),
    [
        ("relu", 2, {}),
        *((case, 4, how) for case in ("relu", "added", "normed", "pooled") for how in STORED),
    ],
    ids=str,
)
def test_on_a_tpu_four_bits_are_there_before_their_value(case, bits, stored, as_on, monkeypatch):
    """It is made of statistics that passed the barrier with them; a sum only if they leave."""
    coded, given = of_case(functools.partial(norm_act, bits=bits, **stored), case)
    args = given(jnp.float32)
    before = coded(*args)[0].value
    keep = barriers.save_residual

    def moved(value, residual, codec):
        (y, affine, (means, variances)), residual = keep(value, residual, codec)
        return (y, affine, (tuple(m - 1 for m in means), variances)), residual

    monkeypatch.setattr(barriers, "save_residual", moved)
    assert_same_bits(coded(*args)[0].value, before)
    as_on("tpu")
    reads = bits == 4 and (case == "relu" or (case == "added" and "offload" in stored))
    assert bool((coded(*args)[0].value != before).any()) == reads


@pytest.mark.parametrize(
    ("codec", "fewer"), [(SignAware(4), 3), (SignAware(2), 2), (Offload(SignAware(4)), 0)]
)
def test_barriers_that_a_tpu_does_without(codec, fewer, as_on):
    """Two are around a convolution. What reads a code of 4 bits, such as the norm, decodes it."""

    def layers(x, kernel):
        x, *_ = ops.norm_act(x, jnp.ones(6), jnp.zeros(6), codec=codec)
        return ops.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=NHWC)

    def barriers(platform):
        as_on(platform)
        y, pull = jax.vjp(layers, normal(SHAPE), normal((3, 3, 6, 6), seed=1))
        return str(jax.make_jaxpr(pull)(y)).count("optimization_barrier")

    assert barriers("cuda") - barriers("tpu") == fewer


@pytest.mark.parametrize(
    ("dtype", "scale_source"),
    [
        (DTYPES[0], SCALE_SOURCES[1]),
        (DTYPES[1], SCALE_SOURCES[0]),
        slow(DTYPES[0], SCALE_SOURCES[0]),
        slow(DTYPES[2], SCALE_SOURCES[0]),
    ],
)
def test_sums_over_a_map_are_those_over_the_windows_of_its_pool(dtype, scale_source, monkeypatch):
    call, given = of_case(norm_act, "pooled")
    args = given(dtype)

    def gradients():
        y, pull = jax.vjp(lambda *args: call(*args, scale_source=scale_source)[0].value, *args)
        return pull(normal(y.shape, dtype, 7))

    expected = gradients()
    monkeypatch.setattr(platforms, "pool_over_map_on_tpu", lambda given, by_map, _: by_map(*given))
    close = dict(rtol=1e-5, atol=1e-5) if dtype == jnp.float32 else dict(rtol=0.02, atol=0.05)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(as_float(a), as_float(b), **close),
        gradients(),
        expected,
    )


@pytest.mark.parametrize(
    ("dtype", "bits"), [(jnp.float32, 4), (jnp.bfloat16, 4), (jnp.float32, 2), (jnp.bfloat16, 3)]
)
@pytest.mark.parametrize("shape", [(4, 8, 8, 64), (3, 9, 5, 48)])
@pytest.mark.parametrize("case", ["relu", "added", "normed"])
def test_kernels_make_the_same_codes_and_gradients(case, shape, dtype, bits, launched_kernels):
    """Up to the rounding of a CPU, which fuses products and sums as it likes."""
    x, residual = normal(shape, dtype), normal(shape, dtype, 1)
    scale, bias = normal((2, shape[-1]), dtype, 2)
    kernel = normal((3, 3, shape[-1], 16), dtype, 3)
    more = {"residual": residual} if case != "relu" else {}
    if case == "normed":
        more["residual_norm"] = (bias, scale)

    def loss(x, scale, bias, kernel, more, codec):
        coded, *_ = ops.norm_act(x, scale, bias, codec=codec, **more)
        y = ops.conv_general_dilated(coded, kernel, (1, 1), "SAME", dimension_numbers=NHWC)
        return (y.astype(jnp.float32) ** 2).sum(), (coded.value, coded.code)

    def found(codec):
        step = jax.value_and_grad(functools.partial(loss, codec=codec), range(5), has_aux=True)
        options = {"xla_allow_excess_precision": False}
        (_, made), gradients = jax.jit(step, compiler_options=options)(x, scale, bias, kernel, more)
        return jax.tree.leaves(made), gradients

    expected, gradients = found(SignAware(bits))
    assert not launched_kernels
    made, by_kernels = found(SignAware(bits, kernels=True))
    assert len(launched_kernels) == 4  # codes, sums, gradients, and what the convolution decodes
    for array, like in zip(made, expected, strict=True):
        differ = np.mean(as_float(array) != as_float(like))
        is_code = array.dtype in (jnp.uint4, jnp.uint8)
        assert differ < (1e-3 * x.size / array.size if is_code else 0.1)
    assert_close(made[0], expected[0], rtol=1e-6 if dtype == jnp.float32 else 1e-2)
    assert_close(by_kernels, gradients, rtol=1e-4 if dtype == jnp.float32 else 2e-2)


def _by_loop(layer, x, kernels):
    def step(x, kernel):
        return layer(x, kernel), None

    return jax.lax.scan(step, x, kernels)[0]


def _by_vmap(layer, x, kernels):
    return jax.vmap(layer, (None, 0))(x, kernels)


@pytest.mark.parametrize("around", [lambda layer: layer, jax.checkpoint], ids=["", "checkpoint"])
@pytest.mark.parametrize("through", [_by_loop, _by_vmap])
def test_kernels_in_loops_lanes_and_checkpoints(through, around, launched_kernels):
    x, kernels = normal((2, 8, 8, 64)), 0.05 * normal((2, 3, 3, 64, 64), seed=1)
    scale, bias = jnp.ones(64), jnp.zeros(64)

    def gradients(codec):
        @around
        def layer(x, kernel):
            coded, *_ = ops.norm_act(x, scale, bias, codec=codec)
            return ops.conv_general_dilated(coded, kernel, (1, 1), "SAME", dimension_numbers=NHWC)

        def loss(x, kernels):
            return (through(layer, x, kernels) ** 2).sum()

        return jax.jit(jax.value_and_grad(loss, (0, 1)))(x, kernels)

    expected = gradients(SignAware())
    assert not launched_kernels
    found = gradients(SignAware(kernels=True))
    assert launched_kernels
    assert_close(found, expected, rtol=1e-4)
