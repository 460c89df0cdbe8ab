import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp import SignAware, ops
from jaxcomp.codecs.sign_aware import Preactivation, Unit
from tests.helpers import (
    DTYPES,
    as_float,
    assert_close,
    assert_same_bits,
    assert_unbiased,
    collectives,
    normal,
    replicate,
    shard,
    stored_shapes,
    without_type_checks,
)

EPSILON = 1e-3
SHAPE = (8, 5, 4, 6)
NHWC = ("NHWC", "HWIO", "NHWC")


def norm_act(x, scale, bias, residual=None, bits=4, unit="norm", **kwargs):
    codec = SignAware(bits, unit=unit)
    return ops.norm_act(x, scale, bias, residual, epsilon=EPSILON, codec=codec, **kwargs)


def stock(x, scale, bias, residual=None, relu=True):
    y, mean, var = ops.batch_norm(x, scale, bias, epsilon=EPSILON)
    y = y if residual is None else y + residual
    return jax.nn.relu(y) if relu else y, mean, var


def levels_of(activation):
    """The stored values in the norm's units, and which are positive."""
    codec, code = activation.codec, activation.code
    if not codec.signed:
        return None, codec.positive(code)
    return codec.decode_preactivation(Preactivation(*code.arrays[:-2]), SHAPE)


UNITS = typing.get_args(Unit)
CASES = {"relu": {}, "added": {"residual": True}, "linear": {"relu": False}}


def arguments(dtype, residual=False):
    """x, scale (of both signs, one tiny, one zero), bias (one beyond the threshold), residual."""
    x = 2 * normal(SHAPE, dtype) + 1
    scale = jnp.array([1.5, -0.7, 1.0, 1e-6, 0.0, -2.0], dtype)
    bias = jnp.array([0.3, -0.2, 9.0, 0.1, 0.2, 0.0], dtype)
    return (x, scale, bias) + ((normal(SHAPE, dtype, 4),) if residual else ())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_forward_is_the_stock_operations(case, dtype):
    kwargs = dict(CASES[case])
    args = arguments(dtype, kwargs.pop("residual", False))
    got = jax.jit(functools.partial(norm_act, **kwargs))(*args)
    expected = jax.jit(functools.partial(stock, **kwargs))(*args)
    assert_same_bits((got[0].value, *got[1:]), expected)


def surrogate(mean, var, relu, positive):
    """The stock function with the exact statistics and mask, for any input."""
    axes = (0, 1, 2)

    def fn(x, scale, bias, residual=None):
        scale, bias = scale[None, None, None], bias[None, None, None]
        moved = (x - jax.lax.stop_gradient(x)).mean(axes, keepdims=True)
        centred = (x - mean) ** 2
        spread = (centred - jax.lax.stop_gradient(centred)).mean(axes, keepdims=True)
        y = (x - mean - moved) * jax.lax.rsqrt(var + spread + EPSILON) * scale + bias
        y = y if residual is None else y + residual
        y = jnp.where(positive, y, 0) if relu else y
        return y, (mean + moved)[0, 0, 0], (var + spread)[0, 0, 0]

    return fn


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_backward_is_exact_at_the_decoded_values(case, bits, unit, monkeypatch):
    kwargs = dict(CASES[case])
    args = arguments(jnp.float32, kwargs.pop("residual", False))
    relu = kwargs.get("relu", True)
    decoded = []

    decode = SignAware.decode_normalized

    def spy(*args):
        decoded.append(decode(*args))
        return decoded[-1]

    monkeypatch.setattr(SignAware, "decode_normalized", spy)

    def outputs(*args):
        y, mean, var = norm_act(*args, bits=bits, unit=unit, **kwargs)
        return y.value, mean, var

    (y, mean, var), pull = jax.vjp(outputs, *args)
    cotangents = tuple(normal(a.shape, a.dtype, seed) for seed, a in enumerate((y, mean, var), 7))
    got = pull(cotangents)
    if decoded:
        h = decoded[0]
    else:
        activation = norm_act(*args, bits=bits, unit=unit, **kwargs)[0]
        h = levels_of(activation)[0] * jnp.where(args[1][None, None, None] < 0, -1, 1)
    mean, var = mean[None, None, None], var[None, None, None]
    x_hat = mean + h * jnp.sqrt(var + EPSILON)
    fn = surrogate(mean, var, relu, y > 0)
    expected = jax.vjp(fn, x_hat, *args[1:])[1](cotangents)
    assert_close(got, expected, 2e-5)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("case", ["relu", "added"])
def test_code_is_the_mask_and_stands_for_the_value(case, unit):
    args = arguments(jnp.float32, case == "added")

    @jax.jit
    def run(seed):
        y = norm_act(*args, unit=unit, seed=seed)[0]
        return y.value, levels_of(y)[1], y.codec.decode(y.code)

    draws = [run(seed) for seed in range(400)]
    value, decoded = np.asarray(draws[0][0]), np.stack([draw[2] for draw in draws])
    for _, mask, _ in draws:
        np.testing.assert_array_equal(mask, value > 0)
    limit = 6 * decoded.std(0) / len(draws) ** 0.5 + 0.01 * np.max(value, (0, 1, 2))
    assert (np.abs(decoded.mean(0) - value) <= limit).all()


def test_convolutions_read_the_code():
    x, scale, bias = arguments(jnp.float32)
    kernel = normal((3, 3, 6, 2), seed=8)

    def conv(x, kernel):
        return ops.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=NHWC)

    activation = norm_act(x, scale, bias)[0]
    out, pull = jax.vjp(lambda k: conv(activation, k), kernel)
    assert_same_bits(jax.jit(conv)(activation, kernel), jax.jit(conv)(activation.value, kernel))
    decoded = activation.codec.decode(activation.code)
    expected = jax.vjp(lambda k: conv(decoded, k), kernel)[1](jnp.ones_like(out))
    assert_close(pull(jnp.ones_like(out)), expected)


def test_one_code_is_stored_for_norm_mask_and_convolution():
    x, scale, bias = arguments(jnp.float32)
    kernel = normal((1, 1, 6, 6), seed=8)

    def unit(x, scale, bias, kernel):
        y = norm_act(x, scale, bias)[0]
        return ops.conv_general_dilated(y, kernel, (1, 1), "SAME", dimension_numbers=NHWC)

    stored = stored_shapes(unit, x, scale, bias, kernel)
    assert [(s, d) for s, d in stored if s == SHAPE] == [(SHAPE, "uint4")]


def test_layout_without_channels_last_is_an_error():
    activation = norm_act(*arguments(jnp.float32))[0]
    layout = ("NCHW", "HWIO", "NCHW")
    with pytest.raises(ValueError, match="lhs: expected an Activation with its channels last"):
        ops.conv_general_dilated(
            activation, jnp.ones((1, 1, 5, 2)), (1, 1), "SAME", dimension_numbers=layout
        )


def test_residual_without_relu_is_an_error():
    with pytest.raises(ValueError, match="residual: expected None with relu=False"):
        norm_act(*arguments(jnp.float32, residual=True), relu=False)


@pytest.mark.parametrize("unit", UNITS)
def test_a_nan_is_visible_to_every_consumer(unit):
    x, scale, bias = arguments(jnp.float32)
    x = x.at[0, 0, 0, 0].set(jnp.nan)
    y = norm_act(x, scale, bias, unit=unit)[0]
    decoded = np.asarray(y.codec.decode(y.code))
    assert np.isnan(decoded[..., 0]).all()
    assert np.isfinite(decoded[..., 1:]).all()
    dx = jax.grad(lambda x: norm_act(x, scale, bias, unit=unit)[0].value[..., 0].sum())(x)
    assert np.isnan(dx[..., 0]).all()


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("place", ["x", "bias", "shortcut"])
def test_a_nan_of_a_statistic_travels_with_what_has_no_code(place, unit):
    x, scale, bias, residual = arguments(jnp.float32, residual=True)
    x, bias, residual = (
        a.at[..., 0].set(jnp.nan) if name == place else a
        for name, a in zip(("x", "bias", "shortcut"), (x, bias, residual), strict=True)
    )
    shortcut = norm_act(residual, scale, bias, relu=False, unit=unit)[0]
    y = norm_act(x, scale, bias, shortcut, unit=unit)[0]
    assert np.isnan(np.asarray(y.codec.decode(y.code))[..., 0]).all()
    assert np.isfinite(np.asarray(y.codec.decode(y.code))[..., 1:]).all()
    y = norm_act(x, scale, bias, unit=unit)[0]
    decoded = np.asarray(y.codec.decode(y.code))
    assert np.isnan(decoded[..., 0]).all() == (place != "shortcut")
    dscale = jax.grad(lambda s: norm_act(x, s, bias, unit=unit)[0].value.sum())(scale)
    assert np.isnan(dscale[0]) == (place != "shortcut")


@pytest.mark.parametrize("unit", UNITS)
def test_the_gradient_of_a_scale_of_zero_is_unbiased(unit):
    x, scale, bias = normal((64, 8, 8, 1)), jnp.zeros(1), jnp.full(1, 0.2)
    dy = normal(x.shape, seed=2)

    def dscale(fn):
        return lambda seed: jax.grad(lambda s: (fn(s, seed) * dy).sum())(scale)

    expected = dscale(lambda s, seed: stock(x, s, bias)[0])(0)
    draw = dscale(lambda s, seed: norm_act(x, s, bias, unit=unit, seed=seed)[0].value)
    draws = jax.jit(jax.vmap(draw))(jnp.arange(300))
    assert_unbiased(draws, expected)


@pytest.mark.parametrize("residual", [False, True])
def test_a_variance_that_was_clipped_has_no_gradient(residual):
    args = arguments(jnp.float32, residual)
    args = (args[0] * 1e-3 + 4000, *args[1:])
    assert (stock(*args)[2] == 0).any()

    def dx(fn):
        return jax.grad(lambda x: (fn(x, *args[1:]) * normal(SHAPE, seed=9)).sum())(args[0])

    channels = np.asarray(stock(*args)[2] == 0)
    got, expected = dx(lambda *a: norm_act(*a)[0].value), dx(lambda *a: stock(*a)[0])
    assert_close(got[..., channels], expected[..., channels], 1e-4)


def test_a_residual_of_another_dtype_has_a_gradient_of_its_own():
    x, scale, bias, residual = arguments(jnp.bfloat16, residual=True)
    gradients = jax.grad(loss, (0, 1, 2, 3))(x, scale, bias, residual.astype(jnp.float32))
    assert [g.dtype.name for g in gradients] == ["bfloat16"] * 3 + ["float32"]


def test_ranges_need_axes_to_lie_along():
    x, scale, bias = normal((8, 6)), jnp.ones(6), jnp.zeros(6)
    with pytest.raises(ValueError, match=r"x of shape \(8, 6\): expected axes between batch and"):
        norm_act(x, scale, bias, unit="range")


def test_ranges_take_a_residual_whose_square_overflows():
    x, scale, bias, residual = arguments(jnp.float32, residual=True)
    y = norm_act(x, scale, bias, 1e20 * residual, unit="range")[0]
    assert np.isfinite(y.codec.decode(y.code)).all()


def test_a_residual_of_another_shape_is_an_error():
    error = pytest.raises(ValueError, match=r"residual of shape \(1, 1, 1, 6\): expected")
    with error, without_type_checks():
        norm_act(*arguments(jnp.float32), jnp.ones((1, 1, 1, 6)))


def loss(x, scale, bias, residual, unit="norm"):
    y = norm_act(x, scale, bias, residual, unit=unit)[0]
    return (y.value.astype(jnp.float32) * normal(SHAPE, seed=9)[: len(x)]).sum()


@pytest.mark.parametrize("unit", UNITS)
def test_under_vmap_scan_and_checkpoint_it_is_itself(unit):
    args = arguments(jnp.float32, residual=True)
    grad = jax.grad(functools.partial(loss, unit=unit), (0, 1, 2, 3))
    expected = jax.jit(grad)(*args)
    assert_close(jax.jit(jax.checkpoint(grad))(*args), expected)
    several = jax.tree.map(lambda a: jnp.stack([a, a]), args)
    lanes = jax.jit(jax.vmap(grad))(*several)
    assert_close(jax.tree.map(lambda a: a[1], lanes), expected)
    _, scanned = jax.jit(lambda a: jax.lax.scan(lambda c, x: (c, grad(*x)), 0, a))(several)
    assert_close(jax.tree.map(lambda a: a[1], scanned), expected)


@pytest.mark.parametrize("unit", UNITS)
def test_sharded_it_has_the_same_codes_and_no_collective_but_the_norms(unit):
    x, scale, bias, residual = arguments(jnp.float32, residual=True)
    args = (shard(x), *map(replicate, (scale, bias)), shard(residual))
    grad = jax.grad(functools.partial(loss, unit=unit), (0, 1, 2, 3))
    assert_close(jax.jit(grad)(*args), jax.jit(grad)(x, scale, bias, residual), 1e-4)
    assert collectives(grad, *args) == {"all-reduce"}


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_of_a_range_positive_values_are_unbiased_and_negative_ones_are_on_average(bits):
    x, scale, bias = arguments(jnp.float32)
    x = x.at[0, 0, 0].multiply(1000.0)
    wide, axes = np.asarray(x, np.float64), (0, 1, 2)
    h = (wide - wide.mean(axes)) / np.sqrt(wide.var(axes) + EPSILON)

    @jax.jit
    @jax.vmap
    def run(seed):
        y = norm_act(x, scale, bias, bits=bits, unit="range", seed=seed)[0]
        h, positive = levels_of(y)
        return h * jnp.where(scale < 0, -1, 1)[None, None, None], positive

    draws, positive = map(np.asarray, run(jnp.arange(2000)))
    # Sums, since many a value lies so near to a level that it is hardly ever rounded the other way.
    sums = (draws * positive[0]).sum((1, 2, 3)), (h * positive[0]).sum(axes)
    assert_unbiased(*(a[..., [0, 2, 3, 4, 5]] for a in sums))  # of the other, ReLU passes nothing
    error = np.abs(draws.sum((1, 2, 3)).mean(0) - h.sum(axes))
    assert (error < 0.02 * np.abs(h).sum(axes)).all()


def test_second_derivatives_are_refused():
    x, scale, bias = arguments(jnp.float32)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        jax.hessian(lambda s: norm_act(x, s, bias)[0].value.sum())(scale)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_have_the_dtypes_of_the_arguments(dtype, unit):
    args = arguments(dtype, residual=True)
    gradients = jax.grad(functools.partial(loss, unit=unit), (0, 1, 2, 3))(*args)
    assert [g.dtype for g in gradients] == [a.dtype for a in args]
    assert all(np.isfinite(as_float(g)).all() for g in gradients)
