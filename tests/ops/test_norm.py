import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxcomp import AvgPool, Cast, Exact, Quantize, ops
from tests.helpers import (
    DTYPES,
    OPTIMIZED,
    as_float,
    assert_close,
    assert_same_bits,
    collectives,
    kept,
    normal,
    replicate,
    shard,
    slow,
    stored_shapes,
    without_type_checks,
)

EPSILON = 1e-3


def flax_batch_norm(x, scale, bias, mask=None, *, axis=-1, **kwargs):
    """`flax.nnx.BatchNorm` in training; without momentum it keeps the batch's own statistics."""
    layer = nnx.BatchNorm(
        x.shape[axis],
        axis=axis,
        momentum=0.0,
        epsilon=EPSILON,
        dtype=x.dtype,
        use_scale=scale is not None,
        use_bias=bias is not None,
        rngs=nnx.Rngs(0),
        **kwargs,
    )
    if scale is not None:
        layer.scale = nnx.Param(scale)
    if bias is not None:
        layer.bias = nnx.Param(bias)
    return layer(x, mask=mask), layer.mean[...], layer.var[...]


def batch_norm(x, scale, bias, mask=None, *, codec, **kwargs):
    return ops.batch_norm(x, scale, bias, mask=mask, epsilon=EPSILON, codec=codec, **kwargs)


def oracle(x, decoded, scale, mask, mean, var, cotangents, axis):
    """The gradients in float64: statistics of `x`, everything else at `decoded`."""
    x, decoded, mean, var = map(as_float, (x, decoded, mean, var))
    dy, dmean, dvar = map(as_float, cotangents)
    axes = tuple(i for i in range(x.ndim) if i != axis % x.ndim)

    def total(a):
        return a.sum(axes, keepdims=True)

    def wide(a):
        return np.expand_dims(a, axes)

    weight = np.broadcast_to(1.0 if mask is None else np.asarray(mask, np.float64), x.shape)
    weight = weight / total(weight)
    scale = 1.0 if scale is None else wide(as_float(scale))
    inverse = (wide(var) + EPSILON) ** -0.5
    centred = decoded - wide(mean)
    dmean = wide(dmean) - inverse * scale * total(dy)
    dvar = wide(dvar) - inverse**3 / 2 * scale * total(dy * centred)
    dx = inverse * scale * dy + weight * (dmean + 2 * dvar * centred)
    return dx, (dy * centred * inverse).sum(axes), dy.sum(axes)


SHAPE = (8, 5, 4, 6)
MASK = normal((8, 5, 4, 1), seed=5) < 0.5
CASES = {
    "plain": {},
    "no scale": {"use_scale": False},
    "no bias": {"use_bias": False},
    "neither": {"use_scale": False, "use_bias": False},
    "slow variance": {"use_fast_variance": False},
    "channels first": {"axis": 1},
    "negative axis": {"axis": -2, "use_fast_variance": False},
    "mask": {"mask": MASK},
    "mask, slow variance": {"mask": MASK, "use_fast_variance": False},
}


def arguments(dtype, use_scale=True, use_bias=True, mask=None, axis=-1, **kwargs):
    """x, scale, bias and mask; keyword arguments."""
    features = SHAPE[axis]
    x = normal(SHAPE, dtype) * 2 + 1
    scale = normal((features,), dtype, 1) if use_scale else None
    bias = normal((features,), dtype, 2) if use_bias else None
    return (x, scale, bias, mask), {"axis": axis, **kwargs}


@pytest.mark.parametrize(
    ("case", "dtype"),
    kept(
        [*((case, jnp.float32) for case in CASES), *(("plain", dtype) for dtype in DTYPES[1:])],
        [
            *((case, jnp.float32) for case in ("plain", "neither", "channels first")),
            ("mask, slow variance", jnp.float32),
            ("plain", jnp.bfloat16),
        ],
    ),
)
def test_forward_is_stock_and_backward_is_exact_at_the_decoded_input(case, dtype):
    (x, scale, bias, mask), kwargs = arguments(dtype, **CASES[case])
    axis, codec = kwargs["axis"], Quantize(4, rounding="nearest")
    op = functools.partial(batch_norm, codec=codec, **kwargs)
    stock = functools.partial(flax_batch_norm, **kwargs)
    out = jax.jit(stock)(x, scale, bias, mask)
    assert_same_bits(jax.jit(op)(x, scale, bias, mask), out)
    cotangents = tuple(normal(a.shape, a.dtype, seed) for seed, a in enumerate(out, 3))

    @jax.jit
    def run(x, scale, bias):
        _, pull = jax.vjp(lambda *args: op(*args, mask), x, scale, bias)
        decoded = jnp.moveaxis(codec.decode(codec.encode(jnp.moveaxis(x, axis, -1))), -1, axis)
        return pull(cotangents), decoded

    gradients, decoded = run(x, scale, bias)
    expected = oracle(x, decoded, scale, mask, *out[1:], cotangents, axis)
    rtol = 10 * float(jnp.finfo(dtype).eps)
    for value, got, want in zip((x, scale, bias), gradients, expected, strict=True):
        if value is None:
            assert got is None
        else:
            assert got.dtype == value.dtype
            assert_close(got, want, rtol)


@pytest.mark.parametrize("case", ["plain", "neither", "channels first", "mask, slow variance"])
def test_exact_codec_gives_the_gradient_of_flax(case):
    (x, scale, bias, mask), kwargs = arguments(jnp.float32, **CASES[case])
    dy = normal(SHAPE, seed=3)

    def gradient(fn, **kwargs):
        def loss(x, scale, bias):
            return (fn(x, scale, bias, mask, **kwargs)[0] * dy).sum()

        given = tuple(i for i, a in enumerate((x, scale, bias)) if a is not None)
        return jax.jit(jax.grad(loss, given))(x, scale, bias)

    assert_close(gradient(batch_norm, codec=Exact(), **kwargs), gradient(flax_batch_norm, **kwargs))


def test_gradient_where_the_fast_variance_is_clipped():
    """A mean so large beside the deviation that E[x^2] - E[x]^2 is rounding: often 0 or less."""
    x = 1e4 + normal((448, 64))
    dy = normal(x.shape, seed=1)

    def gradient(codec):
        def loss(x):
            return (batch_norm(x, None, None, codec=codec)[0] * dy).sum()

        return jax.jit(jax.grad(loss), compiler_options=OPTIMIZED)(x)

    clipped = np.asarray(batch_norm(x, None, None, codec=None)[2]) == 0
    assert 10 < clipped.sum() < 60
    assert_close(gradient(codec=Exact()), gradient(codec=None), 1e-4)


def test_no_codec_leaves_differentiation_to_jax():
    (x, scale, bias, _), _ = arguments(jnp.float32)

    def gradient(codec):
        def loss(x, scale, bias):
            y, mean, var = batch_norm(x, scale, bias, codec=codec)
            return jnp.sin(y).sum() + (mean * var).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2)))(x, scale, bias)

    assert_close(gradient(None), gradient(Exact()))


X, SCALE, BIAS = normal((16, 5, 6)) + 1, normal((6,), seed=1), normal((6,), seed=2)
COTANGENT = normal(X.shape, seed=3)


def loss(x, scale, bias, cotangent, codec, axis_name=None, **kwargs):
    y, mean, var = batch_norm(x, scale, bias, codec=codec, axis_name=axis_name, **kwargs)
    return (y * cotangent).sum(), (mean * var).sum()


def gradient(x, scale, bias, cotangent, codec=None):
    def total(x, scale, bias):
        return sum(loss(x, scale, bias, cotangent, codec))

    return jax.grad(total, (0, 1, 2))(x, scale, bias)


@pytest.mark.parametrize(
    ("check_vma", "fast"), [(True, True), (False, False), slow(True, False), slow(False, True)]
)
def test_axis_name_under_shard_map_is_the_whole_batch(check_vma, fast):
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(x, scale, bias, cotangent):
        terms = loss(x, scale, bias, cotangent, Exact(), "batch", use_fast_variance=fast)
        total = jax.lax.psum(terms[0], "batch")
        return total + (terms[1] if check_vma else jax.lax.pmean(terms[1], "batch"))

    specs = jax.P("batch"), jax.P(), jax.P(), jax.P("batch")
    whole = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=jax.P(), check_vma=check_vma)
    gradients = jax.jit(jax.grad(whole, (0, 1, 2)))(X, SCALE, BIAS, COTANGENT)
    assert_close(gradients, jax.jit(gradient)(X, SCALE, BIAS, COTANGENT))


def test_axis_name_under_vmap_is_the_whole_batch():
    def lane(x, cotangent):
        def own(x, scale, bias):
            return loss(x, scale, bias, cotangent, Exact(), "lanes")[0]

        return jax.grad(own, (0, 1, 2))(x, SCALE, BIAS)

    lanes = (a.reshape(4, 4, 5, 6) for a in (X, COTANGENT))
    dx, *rest = jax.jit(jax.vmap(lane, axis_name="lanes"))(*lanes)
    whole = jax.grad(lambda *args: loss(*args, COTANGENT, None)[0], (0, 1, 2))
    expected = jax.jit(whole)(X, SCALE, BIAS)
    assert_close((dx.reshape(X.shape), *(a.sum(0) for a in rest)), expected)


def test_axis_index_groups_are_batches_of_their_own():
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(x, cotangent):
        kwargs = {"axis_name": "batch", "axis_index_groups": groups}
        return jax.grad(lambda x: loss(x, SCALE, BIAS, cotangent, Exact(), **kwargs)[0])(x)

    spec = jax.P("batch")
    dx = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)

    def half(x, cotangent):
        return jax.grad(lambda x: loss(x, SCALE, BIAS, cotangent, None)[0])(x)

    halves = (a.reshape(2, 8, 5, 6) for a in (X, COTANGENT))
    expected = jax.jit(jax.vmap(half))(*halves).reshape(X.shape)
    assert_close(jax.jit(dx)(X, COTANGENT), expected)


def test_vmap_of_grad_equals_a_loop():
    x, cotangent = (a.reshape(2, 8, 5, 6) for a in (X, COTANGENT))
    per_batch = functools.partial(gradient, codec=Quantize(2))
    batched = jax.jit(jax.vmap(per_batch, (0, None, None, 0)))(x, SCALE, BIAS, cotangent)
    for i in range(2):
        expected = jax.jit(per_batch)(x[i], SCALE, BIAS, cotangent[i])
        assert_close(jax.tree.map(lambda g, i=i: g[i], batched), expected)


def test_eight_devices_give_the_gradient_of_one_by_all_reduce_alone():
    args = shard(X), replicate(SCALE), replicate(BIAS), shard(COTANGENT)
    pull = functools.partial(gradient, codec=Quantize(2))
    assert_close(jax.jit(pull)(*args), jax.jit(pull)(X, SCALE, BIAS, COTANGENT))
    assert collectives(pull, *args) == {"all-reduce"}


def test_stores_the_code_and_the_statistics():
    code = [((16, 5, 3), "uint4"), ((16, 1, 1), "float32"), ((16, 1, 1), "float32")]
    features = [((6,), "float32")] * 4  # mean, variance, scale, bias
    stored = stored_shapes(lambda *args: batch_norm(*args, codec=Quantize(2)), X, SCALE, BIAS)
    assert stored == sorted([*code, *features])


def test_the_codec_sees_the_features_last():
    """The ranges are those of a sample and a feature, wherever the features are."""

    def stored(x, axis):
        return stored_shapes(lambda x: batch_norm(x, None, None, axis=axis, codec=Quantize(2)), x)

    assert stored(jnp.ones((4, 6, 5, 7)), 1) == stored(jnp.ones((4, 5, 7, 6)), -1)


def test_bias_of_the_gradient_is_of_the_order_of_the_codes_variance_over_the_count():
    """The one non-linear use of the stored value: var(code) / (values per feature * var(x))."""
    x, dy = normal((32, 8, 1)), normal((32, 8, 1), seed=1) + normal((32, 8, 1))
    codec = Quantize(1, "sample")

    def pull(seed, codec):
        _, vjp = jax.vjp(lambda x: batch_norm(x, None, None, codec=codec, seed=seed)[0], x)
        return vjp(dy)[0]

    draws = np.asarray(jax.jit(jax.vmap(lambda seed: pull(seed, codec)))(jnp.arange(4000)))
    decoded = jax.jit(jax.vmap(lambda seed: codec.decode(codec.encode(x, seed))))(jnp.arange(4000))
    exact = np.asarray(jax.jit(lambda: pull(None, None))())
    noise = np.asarray(decoded).var(0).mean() / np.asarray(x).var()
    predicted = noise / x.size * np.linalg.norm(exact)
    monte_carlo = np.linalg.norm(draws.std(0)) / len(draws) ** 0.5
    assert np.linalg.norm(draws.mean(0) - exact) < 4 * (predicted + monte_carlo)


@pytest.mark.parametrize("axis", [3, -4, 17])
def test_axis_out_of_range_is_an_error(axis):
    with pytest.raises(ValueError, match=rf"axis={axis}: x of shape \(16, 5, 6\) has no such axis"):
        batch_norm(X, None, None, axis=axis, codec=Cast())


def test_window_larger_than_the_map_is_an_error():
    with pytest.raises(ValueError, match="window=6 is larger than the map"):
        batch_norm(X, None, None, codec=AvgPool(6))


def test_integers_are_an_error():
    with without_type_checks(), pytest.raises(TypeError, match="got x of dtype int32"):
        batch_norm(X.astype(jnp.int32), None, None, codec=Cast())


def layer_norm_oracle(decoded, scale, mean, var, dy):
    """The gradients in float64: statistics of each token of `x`, everything else at `decoded`."""
    decoded, dy = as_float(decoded), as_float(dy)
    inverse = (as_float(var)[..., None] + EPSILON) ** -0.5
    h = (decoded - as_float(mean)[..., None]) * inverse
    dh = dy * (1.0 if scale is None else as_float(scale))
    others = tuple(range(dy.ndim - 1))
    dx = inverse * (dh - dh.mean(-1, keepdims=True) - h * (dh * h).mean(-1, keepdims=True))
    return dx, (dy * h).sum(others), dy.sum(others)


@pytest.mark.parametrize(
    ("shape", "parameters", "fast"),
    kept(
        itertools.product([(4, 7, 16), (5, 8)], [True, False], [True, False]),
        [((4, 7, 16), True, True), ((4, 7, 16), False, False), ((5, 8), True, False)],
    ),
)
def test_layer_norm(shape, parameters, fast):
    x = normal(shape) * 2 + 1
    scale, bias = (normal(shape[-1:], seed=i) if parameters else None for i in (1, 2))
    codec, dy = Quantize(bits=4), normal(shape, seed=3)
    layer = nnx.LayerNorm(
        shape[-1],
        epsilon=EPSILON,
        use_scale=parameters,
        use_bias=parameters,
        use_fast_variance=fast,
        rngs=nnx.Rngs(0),
    )
    if parameters:
        layer.scale, layer.bias = nnx.Param(scale), nnx.Param(bias)

    def op(x, scale, bias):
        return ops.layer_norm(
            x, scale, bias, epsilon=EPSILON, use_fast_variance=fast, codec=codec, seed=5
        )

    assert_same_bits(jax.jit(op)(x, scale, bias), jax.jit(layer)(x))
    gradient = jax.jit(lambda *args: jax.vjp(op, *args)[1](dy))
    decoded = jax.jit(lambda x: codec.decode(codec.encode(x, 5)))(x)
    expected = layer_norm_oracle(decoded, scale, x.mean(-1), x.var(-1), dy)
    for got, want in zip(gradient(x, scale, bias), expected, strict=True):
        if got is not None:
            assert_close(got, want.astype(np.float32), 1e-4)
    stored = stored_shapes(op, x, scale, bias)
    assert (x.shape, "uint4") in stored and (x.shape, "float32") not in stored


def test_layer_norm_on_eight_devices_does_not_communicate():
    x = shard(normal((16, 5, 8)))

    def gradient(x):
        return jax.grad(lambda x: (ops.layer_norm(x, None, None, codec=Quantize(2)) ** 2).sum())(x)

    assert collectives(gradient, x) == set()
