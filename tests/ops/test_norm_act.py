import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxcomp import SignAware, ops
from jaxcomp.codecs._sign_aware import Preactivation
from tests.helpers import (
    DTYPES,
    as_float,
    assert_close,
    assert_same_bits,
    assert_unbiased,
    collectives,
    kept,
    normal,
    replicate,
    shard,
    slow,
    stored_shapes,
)
from tests.ops.norm_act_cases import (
    CASES,
    EPSILON,
    NHWC,
    POOLED,
    SCALE_SOURCES,
    SHAPE,
    arguments,
    norm_act,
    of_case,
    stock,
)

# Every case with every source of scales, and every source with every number of bits.
EACH_WITH_EACH = [
    (case, (2, 3, 4)[(i + j) % 3], source)
    for i, case in enumerate(CASES)
    for j, source in enumerate(SCALE_SOURCES)
]


def levels_of(activation):
    """The stored values in the norm's units, and which are positive."""
    codec, code = activation.codec, activation.code
    if not codec.signed:
        return None, codec.positive(code)
    return codec.decode_preactivation(Preactivation(*code.arrays[:-3]), SHAPE)


def test_noise_differs_between_batches_and_lanes_with_the_same_parameters():
    def salt(x):
        norm_act = functools.partial(ops.norm_act, axis_name="lanes", codec=SignAware(4))
        return norm_act(x, jnp.ones(SHAPE[-1:]), jnp.zeros(SHAPE[-1:]))[0].code.arrays[-3]

    batch = 5 + jnp.stack([normal(SHAPE, seed=i) for i in range(8)])
    salts = jax.jit(jax.vmap(salt, axis_name="lanes"))
    assert len({*salts(batch).tolist(), *salts(batch + 1).tolist()}) == 16
    assert salts(batch).tolist() == salts(batch).tolist()


@pytest.mark.parametrize(
    ("case", "dtype"),
    kept(
        itertools.product(CASES, DTYPES),
        [*((case, jnp.float32) for case in CASES), *(("pooled", dtype) for dtype in DTYPES)],
    ),
)
def test_forward_is_the_stock_operations(case, dtype):
    (coded, given), (exact, _) = of_case(norm_act, case), of_case(stock, case)
    got, *statistics = jax.jit(coded)(*given(dtype))
    assert_same_bits((got.value, *statistics), jax.jit(exact)(*given(dtype)))


def wide(channels):
    return channels[None, None, None]


def moved_norm(mean, var, x, scale, bias):
    """A batch norm with exact statistics, for any input."""
    axes = (0, 1, 2)
    mean, var = wide(mean), wide(var)
    moved = (x - jax.lax.stop_gradient(x)).mean(axes, keepdims=True)
    centred = (x - mean) ** 2
    spread = (centred - jax.lax.stop_gradient(centred)).mean(axes, keepdims=True)
    y = (x - mean - moved) * jax.lax.rsqrt(var + spread + EPSILON)
    y = y * wide(scale) + wide(bias)
    return y, (mean + moved)[0, 0, 0], (var + spread)[0, 0, 0]


def surrogate(case, means, variances, exact):
    """The stock function with the exact statistics, mask and maxima, for any input."""

    def fn(x, scale, bias, residual=None, *of_residual):
        y, *found = moved_norm(means[0], variances[0], x, scale, bias)
        found = [found]
        if of_residual:
            residual, *others = moved_norm(means[1], variances[1], residual, *of_residual)
            found.append(others)
        y = y if residual is None else y + residual
        y = y if case == "linear" else jnp.where(exact > 0, y, 0)
        if case == "pooled":
            _, pull = jax.vjp(lambda y: nnx.max_pool(y, *CASES[case]["pool"]), exact)
            (y,) = jax.linear_transpose(lambda c: pull(c)[0], jnp.zeros(POOLED))(y)
        return y, *map(tuple, zip(*found, strict=True))

    return fn


# Each case once, and each number of bits.
BY_DEFAULT = [c for i, c in enumerate(EACH_WITH_EACH) if i % 4 in (0, 3)]


@pytest.mark.parametrize(("case", "bits", "scale_source"), kept(EACH_WITH_EACH, BY_DEFAULT))
def test_backward_is_exact_at_the_decoded_values(case, bits, scale_source, monkeypatch):
    coded, given = of_case(functools.partial(norm_act, bits=bits, scale_source=scale_source), case)
    args = given(jnp.float32)
    decoded = []

    decode = SignAware.decode_normalized

    def spy(codec, code, shape):
        values = decode(codec, code, shape)
        if shape == SHAPE:  # not at the maxima of a pool alone
            decoded.append(values)
        return values

    monkeypatch.setattr(SignAware, "decode_normalized", spy)

    def outputs(*args):
        y, *statistics = coded(*args)
        return y.value, *statistics

    @jax.jit
    def gradients(*args):
        out, pull = jax.vjp(outputs, *args)
        leaves, tree = jax.tree.flatten(out)
        cotangents = [normal(a.shape, a.dtype, seed) for seed, a in enumerate(leaves, 7)]
        cotangents = jax.tree.unflatten(tree, cotangents)
        return out, cotangents, pull(cotangents), decoded or codes(*args)

    def codes(*args):
        return [levels_of(coded(*args)[0])[0] * jnp.where(wide(args[1]) < 0, -1, 1)]

    before_pool, _ = of_case(stock, "relu" if case == "pooled" else case)

    @jax.jit
    def expected(means, variances, decoded, cotangents, *args):
        at = [*args]
        for i, h, mean, var in zip((0, 3), decoded, means, variances, strict=False):
            at[i] = wide(mean) + h * jnp.sqrt(wide(var) + EPSILON)
        fn = surrogate(case, means, variances, before_pool(*args)[0])
        return jax.vjp(fn, *at)[1](cotangents)

    (_, *statistics), cotangents, got, levels = gradients(*args)
    assert_close(got, expected(*statistics, levels, cotangents, *args), 2e-5)


@pytest.mark.parametrize("scale_source", SCALE_SOURCES)
@pytest.mark.parametrize("case", ["relu", "added"])
def test_code_is_the_mask_and_stands_for_the_value(case, scale_source):
    args = arguments(jnp.float32, case == "added")

    @jax.jit
    @jax.vmap
    def run(seed):
        y = norm_act(*args, scale_source=scale_source, seed=seed)[0]
        return y.value, levels_of(y)[1], y.codec.decode(y.code)

    values, masks, decoded = map(np.asarray, run(jnp.arange(400)))
    value = values[0]
    np.testing.assert_array_equal(masks, np.broadcast_to(value > 0, masks.shape))
    limit = 6 * decoded.std(0) / len(decoded) ** 0.5 + 0.01 * np.max(value, (0, 1, 2))
    assert (np.abs(decoded.mean(0) - value) <= limit).all()


def test_convolutions_read_the_code():
    x, scale, bias = arguments(jnp.float32)
    kernel = normal((3, 3, 6, 2), seed=8)

    def conv(x, kernel):
        return ops.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=NHWC)

    def gradient(x, kernel):
        return jax.grad(lambda k: conv(x, k).sum())(kernel)

    activation = jax.jit(norm_act)(x, scale, bias)[0]
    assert_same_bits(jax.jit(conv)(activation, kernel), jax.jit(conv)(activation.value, kernel))
    decoded = activation.codec.decode(activation.code)
    expected = jax.jit(gradient)(decoded, kernel)
    assert_close(jax.jit(gradient)(activation, kernel), expected)


def test_one_code_is_stored_for_norm_mask_and_convolution():
    x, scale, bias = arguments(jnp.float32)
    kernel = normal((1, 1, 6, 6), seed=8)

    def layers(x, scale, bias, kernel):
        y = norm_act(x, scale, bias)[0]
        return ops.conv_general_dilated(y, kernel, (1, 1), "SAME", dimension_numbers=NHWC)

    stored = stored_shapes(layers, x, scale, bias, kernel)
    assert [(s, d) for s, d in stored if s == SHAPE] == [(SHAPE, "uint4")]


@pytest.mark.parametrize("scale_source", SCALE_SOURCES)
def test_a_nan_is_visible_to_every_consumer(scale_source):
    x, scale, bias = arguments(jnp.float32)
    x = x.at[0, 0, 0, 0].set(jnp.nan)

    @functools.partial(jax.grad, has_aux=True)
    def gradient(x):
        y = norm_act(x, scale, bias, scale_source=scale_source)[0]
        return y.value[..., 0].sum(), y.codec.decode(y.code)

    dx, decoded = jax.jit(gradient)(x)
    assert np.isnan(decoded[..., 0]).all()
    assert np.isfinite(decoded[..., 1:]).all()
    assert np.isnan(dx[..., 0]).all()


@pytest.mark.parametrize(
    ("place", "scale_source"),
    kept(
        itertools.product(["x", "bias", "shortcut"], SCALE_SOURCES),
        [("x", "norm"), ("bias", "range"), ("shortcut", "norm")],
    ),
)
def test_a_nan_of_a_statistic_travels_with_what_has_no_code(place, scale_source):
    x, scale, bias, residual = arguments(jnp.float32, residual=True)
    x, bias, residual = (
        a.at[..., 0].set(jnp.nan) if name == place else a
        for name, a in zip(("x", "bias", "shortcut"), (x, bias, residual), strict=True)
    )

    @jax.jit
    def added(x, bias, residual):
        shortcut = norm_act(residual, scale, bias, relu=False, scale_source=scale_source)[0]
        y = norm_act(x, scale, bias, shortcut, scale_source=scale_source)[0]
        return y.codec.decode(y.code)

    @functools.partial(jax.grad, has_aux=True)
    def alone(scale, x, bias):
        y = norm_act(x, scale, bias, scale_source=scale_source)[0]
        return y.value.sum(), y.codec.decode(y.code)

    decoded = added(x, bias, residual)
    assert np.isnan(decoded[..., 0]).all()
    assert np.isfinite(decoded[..., 1:]).all()
    dscale, decoded = jax.jit(alone)(scale, x, bias)
    assert np.isnan(decoded[..., 0]).all() == (place != "shortcut")
    assert np.isnan(dscale[0]) == (place != "shortcut")


@pytest.mark.parametrize("scale_source", SCALE_SOURCES)
def test_the_gradient_of_a_scale_of_zero_is_unbiased(scale_source):
    x, scale, bias = normal((64, 8, 8, 1)), jnp.zeros(1), jnp.full(1, 0.2)
    dy = normal(x.shape, seed=2)

    def dscale(fn):
        return lambda seed: jax.grad(lambda s: (fn(s, seed) * dy).sum())(scale)

    expected = jax.jit(dscale(lambda s, seed: stock(x, s, bias)[0]))(0)
    draw = dscale(
        lambda s, seed: norm_act(x, s, bias, scale_source=scale_source, seed=seed)[0].value
    )
    draws = jax.jit(jax.vmap(draw))(jnp.arange(300))
    assert_unbiased(draws, expected)


@pytest.mark.parametrize("residual", [False, True])
def test_a_variance_that_was_clipped_has_no_gradient(residual):
    args = arguments(jnp.float32, residual)
    args = (args[0] * 1e-3 + 4000, *args[1:])
    clipped = np.asarray(stock(*args)[2][0] == 0)
    assert clipped.any()

    def dx(fn):
        loss = jax.grad(lambda x: (fn(x, *args[1:]) * normal(SHAPE, seed=9)).sum())
        return jax.jit(loss)(args[0])

    got, expected = dx(lambda *a: norm_act(*a)[0].value), dx(lambda *a: stock(*a)[0])
    assert_close(got[..., clipped], expected[..., clipped], 1e-4)


def test_a_residual_of_another_dtype_has_a_gradient_of_its_own():
    x, scale, bias, residual = arguments(jnp.bfloat16, residual=True)
    grad, _ = loss_of("added")
    gradients = jax.jit(grad)(x, scale, bias, residual.astype(jnp.float32))
    assert [g.dtype.name for g in gradients] == ["bfloat16"] * 3 + ["float32"]


def test_ranges_take_a_residual_whose_square_overflows():
    x, scale, bias, residual = arguments(jnp.float32, residual=True)
    y = norm_act(x, scale, bias, 1e20 * residual, scale_source="range")[0]
    assert np.isfinite(y.codec.decode(y.code)).all()


def loss_of(case, scale_source="norm"):
    """A scalar function of the case's arguments, which of each sample is a part of; and these."""
    coded, given = of_case(functools.partial(norm_act, scale_source=scale_source), case)

    def loss(*args):
        y = coded(*args)[0].value
        return (y.astype(jnp.float32) * normal(y.shape, seed=9)).sum()

    return jax.grad(loss, range(len(given(jnp.float32)))), given


ADDED = ["added", "normed", "pooled"]
ADDED_AND_SOURCES = [*((case, SCALE_SOURCES[0]) for case in ADDED), ("pooled", SCALE_SOURCES[1])]


@pytest.mark.parametrize(("case", "scale_source"), kept(ADDED_AND_SOURCES, ADDED_AND_SOURCES[1::2]))
def test_under_vmap_scan_and_checkpoint_it_is_itself(case, scale_source):
    grad, given = loss_of(case, scale_source)
    args = given(jnp.float32)
    expected = jax.jit(grad)(*args)
    assert_close(jax.jit(jax.checkpoint(grad))(*args), expected)
    several = jax.tree.map(lambda a: jnp.stack([a, a]), args)
    lanes = jax.jit(jax.vmap(grad))(*several)
    assert_close(jax.tree.map(lambda a: a[1], lanes), expected)
    _, scanned = jax.jit(lambda a: jax.lax.scan(lambda c, x: (c, grad(*x)), 0, a))(several)
    assert_close(jax.tree.map(lambda a: a[1], scanned), expected)


@pytest.mark.parametrize(("case", "scale_source"), kept(ADDED_AND_SOURCES, ADDED_AND_SOURCES[1::2]))
def test_sharded_it_has_the_same_codes_and_no_collective_but_the_norms(case, scale_source):
    grad, given = loss_of(case, scale_source)
    args = given(jnp.float32)
    spread = [shard(a) if a.shape == SHAPE else replicate(a) for a in args]
    assert_close(jax.jit(grad)(*spread), jax.jit(grad)(*args), 1e-4)
    assert collectives(grad, *spread) == {"all-reduce"}


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_of_a_range_positive_values_are_unbiased_and_negative_ones_are_on_average(bits):
    x, scale, bias = arguments(jnp.float32)
    x = x.at[0, 0, 0].multiply(1000.0)
    wide, axes = np.asarray(x, np.float64), (0, 1, 2)
    h = (wide - wide.mean(axes)) / np.sqrt(wide.var(axes) + EPSILON)

    @jax.jit
    @jax.vmap
    def run(seed):
        y = norm_act(x, scale, bias, bits=bits, scale_source="range", seed=seed)[0]
        h, positive = levels_of(y)
        return h * jnp.where(scale < 0, -1, 1)[None, None, None], positive

    draws, positive = map(np.asarray, run(jnp.arange(2000)))
    # Sums, since many a value lies so near to a level that it is hardly ever rounded the other way.
    sums = (draws * positive[0]).sum((1, 2, 3)), (h * positive[0]).sum(axes)
    assert_unbiased(*(a[..., [0, 2, 3, 4, 5]] for a in sums))  # of the other, ReLU passes nothing
    error = np.abs(draws.sum((1, 2, 3)).mean(0) - h.sum(axes))
    assert (error < 0.02 * np.abs(h).sum(axes)).all()


@pytest.mark.parametrize(
    ("dtype", "case"),
    kept(itertools.product(DTYPES, ADDED), [*zip(DTYPES, ADDED, strict=True)]),
)
def test_gradients_have_the_dtypes_of_the_arguments(dtype, case):
    grad, given = loss_of(case)
    gradients = jax.jit(grad)(*given(dtype))
    assert [g.dtype for g in gradients] == [a.dtype for a in given(dtype)]
    assert all(np.isfinite(as_float(g)).all() for g in gradients)


@pytest.mark.parametrize(("case", "place"), [("normed", 1), ("normed", 4), slow("pooled", 1)])
def test_scales_have_unbiased_gradients(case, place):
    coded, given = of_case(norm_act, case)
    exact, _ = of_case(stock, case)
    args = [*given(jnp.float32)]
    args[0] = jnp.clip(args[0], -4, 4)  # nothing is beyond the levels

    def dscale(fn, seed=None):
        def loss(scale):
            y = fn(*args[:place], scale, *args[place + 1 :], seed)
            return (y * normal(y.shape, seed=9)).sum()

        return jax.grad(loss)(args[place])

    expected = jax.jit(lambda: dscale(lambda *a: exact(*a[:-1])[0]))()
    draw = jax.vmap(lambda seed: dscale(lambda *a: coded(*a[:-1], seed=a[-1])[0].value, seed))
    assert_unbiased(jax.jit(draw)(jnp.arange(600)), expected)


def test_of_two_norms_there_is_a_code_each_and_one_of_the_sum():
    coded, given = of_case(norm_act, "normed")
    stored = stored_shapes(lambda *a: coded(*a)[0].value, *given(jnp.float32))
    assert [(s, d) for s, d in stored if s == SHAPE] == [(SHAPE, "uint4")] * 3


def test_of_a_pool_there_are_codes_before_and_after_it_and_indices():
    coded, given = of_case(norm_act, "pooled")
    stored = stored_shapes(lambda *a: coded(*a)[0].value, *given(jnp.float32))
    maps = [(s, d) for s, d in stored if len(s) == 4 and s[0] == len(given(jnp.float32)[0])]
    assert maps == sorted([(SHAPE, "uint4"), (POOLED, "uint4"), (POOLED, "uint4")])


@pytest.mark.parametrize(
    ("case", "place", "scale_source"),
    [
        ("normed", 0, "norm"),
        ("normed", 3, "range"),
        ("pooled", 0, "norm"),
        slow("normed", 0, "range"),
        slow("normed", 3, "norm"),
        slow("pooled", 0, "range"),
    ],
)
def test_a_nan_shows_behind_a_sum_or_a_pool(case, place, scale_source):
    coded, given = of_case(functools.partial(norm_act, scale_source=scale_source), case)
    args = [*given(jnp.float32)]
    args[place] = args[place].at[0, 0, 0, 0].set(jnp.nan)

    def loss(*args):
        y = coded(*args)[0]
        return y.value[..., 0].sum(), y.codec.decode(y.code)

    gradient, decoded = jax.jit(jax.grad(loss, place, has_aux=True))(*args)
    assert np.isnan(decoded[..., 0]).all()
    assert np.isfinite(decoded[..., 1:]).all()
    assert np.isnan(gradient[..., 0]).all()
