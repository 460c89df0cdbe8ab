"""A linear layer and LayerScale as one operation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxcomp as jc
from jaxcomp import ops
from tests.helpers import DTYPES, assert_close, collectives, normal, replicate, shard, stored_shapes

CODECS = jc.Quantize(bits=2), jc.BlockSparse(4, 0.5), jc.Exact()
X = normal((8, 6, 16))
PARAMS = normal((16, 10), seed=1), normal((10,), seed=2), normal((10,), seed=3)


def stock(x, kernel, bias, scale):
    kernel, bias, scale = (a.astype(x.dtype) for a in (kernel, bias, scale))
    y = jax.lax.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))
    return (y + bias[None, None]) * scale[None, None]


def pull(fn):
    return jax.jit(lambda g, *args: jax.vjp(fn, *args)[1](g))


@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_is_bit_identical(dtype):
    x = X.astype(dtype)
    coded = functools.partial(ops.scaled_linear, codec=jc.Quantize(bits=2))
    got, pullback = jax.vjp(jax.jit(coded), x, *PARAMS)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, jax.jit(stock)(x, *PARAMS))
    assert [g.dtype for g in pullback(got)] == [dtype, *[jnp.float32] * 3]


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.name)
@pytest.mark.parametrize("scale", [PARAMS[2], jnp.zeros(10)])
def test_gradients_are_exact_at_the_decoded_input(codec, scale):
    kernel, bias, _ = PARAMS
    g = normal((8, 6, 10), seed=4)
    coded = functools.partial(ops.scaled_linear, codec=codec)
    decoded = jax.jit(lambda x: codec.decode(codec.encode(x)))(X)
    dx, *_ = pull(stock)(g, X, kernel, bias, scale)
    _, *expected = pull(stock)(g, decoded, kernel, bias, scale)
    got = pull(coded)(g, X, kernel, bias, scale)
    assert_close(got[0], dx, 1e-5)
    assert_close(list(got[1:]), expected, 1e-5)


def test_the_gradients_of_narrow_floats_are_summed_in_float32():
    """Nearer to the exact ones than those of the three operations."""
    x, g = X.astype(jnp.bfloat16), normal((8, 6, 10), seed=4).astype(jnp.bfloat16)
    exact = pull(stock)(g.astype(jnp.float32), x.astype(jnp.float32), *PARAMS)
    coded = functools.partial(ops.scaled_linear, codec=jc.Exact())

    def error(fn):
        got = jax.vjp(fn, x, *PARAMS)[1](g)
        return np.array(
            [float(jnp.abs(a - b).max()) for a, b in zip(got[1:], exact[1:], strict=True)]
        )

    assert np.all(error(coded) < error(stock))


def test_stored_is_the_input_alone():
    coded = functools.partial(ops.scaled_linear, codec=jc.Quantize(bits=2))
    batch = [s for s in stored_shapes(coded, X, *PARAMS) if s[0][:1] == (8,)]
    assert batch == sorted(
        (a.shape, a.dtype.name) for a in jax.tree.leaves(jc.Quantize(bits=2).encode(X))
    )
    frozen = functools.partial(coded, kernel=PARAMS[0], bias=PARAMS[1], scale=PARAMS[2])
    assert stored_shapes(frozen, X) == sorted((p.shape, "float32") for p in PARAMS)
    bias_alone = functools.partial(coded, X, PARAMS[0], scale=PARAMS[2])
    assert stored_shapes(bias_alone, PARAMS[1]) == sorted((p.shape, "float32") for p in PARAMS)


@pytest.mark.parametrize("scale", [1e-2, 1e-6])
def test_float16_has_the_range_of_a_small_scale(scale):
    kernel = 0.02 * PARAMS[0]
    factor, g = jnp.full(10, scale), 256 * normal((8, 6, 10), seed=4)
    coded = functools.partial(ops.scaled_linear, codec=jc.Exact())
    args = X.astype(jnp.float16), kernel, None, factor
    dx, *rest = pull(coded)(g.astype(jnp.float16), *args)
    expected = jnp.einsum("btn,fn->btf", g, kernel) * scale
    error = jnp.linalg.norm(dx - expected) / jnp.linalg.norm(expected)
    assert float(error) < 0.02  # 1e-10 is a multiple of float16's least number, 6e-8, or zero
    assert all(bool(jnp.isfinite(a).all()) for a in jax.tree.leaves(rest))


@pytest.mark.parametrize("kernel", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("scale", [jnp.bfloat16, jnp.float32])
def test_parameters_of_other_dtypes(kernel, scale):
    dtypes = kernel, jnp.float32, scale
    params = [p.astype(d) for p, d in zip(PARAMS, dtypes, strict=True)]
    coded = functools.partial(ops.scaled_linear, codec=jc.Exact())
    y, pullback = jax.vjp(coded, X, *params)
    np.testing.assert_array_equal(y, stock(X, *params))
    got, expected = pullback(y), jax.vjp(stock, X, *params)[1](y)
    assert [g.dtype for g in got] == [jnp.float32, *dtypes]
    for one, other in zip(got, expected, strict=True):
        assert_close(one, other, 4 * float(jnp.finfo(one.dtype).eps) + 1e-5)


def test_vmap_of_grad_equals_a_loop():
    xs = jnp.stack([X, 2 * X])
    gradient = jax.grad(
        lambda x, *params: jnp.sin(ops.scaled_linear(x, *params, codec=jc.Exact())).sum(),
        (0, 1, 2, 3),
    )
    batched = jax.jit(jax.vmap(gradient, (0, None, None, None)))(xs, *PARAMS)
    for i, x in enumerate(xs):
        expected = jax.jit(gradient)(x, *PARAMS)
        assert_close(jax.tree.map(lambda g, i=i: g[i], batched), expected, 1e-5)


def test_a_spread_batch_is_summed_at_the_end():
    def loss(params, x):
        return jnp.sin(ops.scaled_linear(x, *params, codec=jc.Quantize(bits=4))).sum()

    gradient = jax.jit(jax.grad(loss))
    spread = replicate(PARAMS), shard(X)
    assert collectives(gradient, *spread) == {"all-reduce"}
    assert_close(gradient(*spread), gradient(PARAMS, X), 1e-5)


def test_second_derivatives_are_right_or_refused():
    def loss(op):
        return lambda kernel, x: jnp.sin(op(x, kernel, *PARAMS[1:])).sum()

    coded, exact = (
        loss(functools.partial(ops.scaled_linear, codec=jc.Quantize(bits=2))),
        loss(stock),
    )
    kernel = PARAMS[0]
    of_exact = loss(functools.partial(ops.scaled_linear, codec=jc.Exact()))
    got, expected = (
        jax.jit(lambda k, f=f: jax.jvp(lambda k: jax.grad(f)(k, X), (k,), (k,))[1])(kernel)
        for f in (of_exact, exact)
    )
    assert_close(got, expected, 1e-5)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        jax.jvp(lambda x: jax.grad(coded)(kernel, x), (X,), (X,))


def test_an_input_that_cannot_be_stored_is_an_error():
    with pytest.raises(TypeError):
        ops.scaled_linear(X.astype(int), *PARAMS, codec=jc.Quantize(bits=2))
    with pytest.raises(ValueError, match="expected a lower density"):
        ops.scaled_linear(X, *PARAMS, codec=jc.BlockSparse(4, 1.0))


def layers(**of_scale):
    rngs = nnx.Rngs(0)
    linear = jc.nn.Linear(16, 10, codec=jc.Quantize(bits=2), rngs=rngs)
    options = {"use_bias": False, "scale_init": 0.5, "codec": jc.Quantize(bits=4)} | of_scale
    return linear, jc.nn.Affine(10, rngs=rngs, **options)


def maps_stored(linear, scale):
    """Arrays of the batch and its tokens that wait, but for the linear layer's input."""

    def forward(state, x):
        linear, scale = nnx.merge(graphdef, state)
        return linear(x, scale=scale)

    graphdef, state = nnx.split(nnx.List([linear, scale]))
    kept = [shape for shape, _ in stored_shapes(forward, state, X) if shape[:2] == (8, 6)]
    return len(kept) - 1


@pytest.mark.parametrize(
    ("of_scale", "stored"),
    [({}, 0), ({"codec": jc.Exact()}, 1), ({"codec": None}, 1), ({"use_bias": True}, 1)],
)
def test_layers_are_one_operation_where_the_scale_has_a_codec(of_scale, stored):
    linear, scale = layers(**of_scale)
    np.testing.assert_array_equal(linear(X, scale=scale), scale(linear(X)))
    assert maps_stored(linear, scale) == stored


@pytest.mark.parametrize(
    ("x", "kernel", "linear", "scale"),
    [
        ("float32", "float32", "bfloat16", None),
        ("float32", "float32", None, "bfloat16"),
        ("bfloat16", "bfloat16", None, None),
    ],
)
def test_layers_of_two_dtypes_are_applied_in_turn(x, kernel, linear, scale):
    first, second = layers(dtype=scale)
    first.dtype = None if linear is None else jnp.dtype(linear)
    first.kernel[...] = first.kernel[...].astype(kernel)
    first.bias[...] = first.bias[...].astype(kernel)
    got, expected = first(X.astype(x), scale=second), second(first(X.astype(x)))
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)
