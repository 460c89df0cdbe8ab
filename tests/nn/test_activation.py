import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxcomp as jc
from jaxcomp.codecs._codec import array_nbytes
from tests.helpers import without_type_checks

# Ties, zeros of both signs and non-finite values are where masks and indices could go wrong.
VALUES = np.random.default_rng(0).integers(-2, 3, (2, 7, 8, 3)).astype(np.float32)
VALUES[0, 0, :4, 0] = -0.0, np.inf, -np.inf, np.nan


def _gradient(layer: typing.Callable[[jax.Array], jax.Array], x: jax.Array) -> typing.Any:
    @jax.jit
    def run(x: jax.Array) -> typing.Any:
        y, backward = jax.vjp(layer, x)
        weights = np.random.default_rng(1).normal(size=y.shape)
        return y, *backward(jnp.asarray(weights, y.dtype))

    return run(x)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("codec", [None, jc.Packed(bits=1)])
def test_relu_is_flax_own(
    codec: jc.Packed | None, dtype: typing.Any, assert_same: typing.Any
) -> None:
    x = jnp.asarray(VALUES, dtype)
    layer = jc.nn.ReLU(codec=codec)
    assert not jax.tree.leaves(nnx.state(layer))
    assert_same(_gradient(layer, x), _gradient(nnx.relu, x))


POOLS = {
    "plain": ((3, 3), (2, 2), [(1, 1), (1, 1)]),
    "strides": ((2, 3), None, "VALID"),
    "same": ((3, 2), (2, 1), "SAME"),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("args", POOLS.values(), ids=POOLS)
@pytest.mark.parametrize("codec", [None, jc.Packed(bits=4)])
def test_max_pool_is_flax_own(
    codec: jc.Packed | None, args: typing.Any, dtype: typing.Any, assert_same: typing.Any
) -> None:
    x = jnp.asarray(np.nan_to_num(VALUES, nan=1.0, posinf=4.0, neginf=-4.0), dtype)
    layer = jc.nn.MaxPool(*args, codec=codec)
    assert not jax.tree.leaves(nnx.state(layer))
    (y, dx), (expected_y, expected) = (
        _gradient(f, x) for f in (layer, lambda x: nnx.max_pool(x, *args))
    )
    assert_same(y, expected_y)
    tolerance = 1e-6 if dtype == jnp.float32 else 2e-2  # overlapping windows add in any order
    np.testing.assert_allclose(
        dx.astype(jnp.float32), expected.astype(jnp.float32), rtol=tolerance, atol=tolerance
    )


def test_too_few_bits_for_the_window_is_an_error() -> None:
    with pytest.raises(ValueError, match="codec"):
        jc.nn.MaxPool((3, 3), codec=jc.Packed(bits=3))(jnp.ones((1, 4, 4, 1)))


def test_what_is_kept() -> None:
    x = jnp.ones((2, 8, 8, 16), jnp.float32)
    for layer, nbytes in (
        (jc.nn.ReLU(codec=jc.Packed(bits=1)), x.size // 8),
        (jc.nn.MaxPool((2, 2), (2, 2), codec=jc.Packed(bits=2)), x.size // 4 * 2 // 8),
    ):
        _, backward = jax.vjp(layer, x)
        kept = jax.tree.leaves(backward)
        assert sum(array_nbytes(a.shape, a.dtype) for a in kept) == nbytes


def test_codec_is_static() -> None:
    pool = functools.partial(jc.nn.MaxPool, (2, 1))
    for layer in (jc.nn.ReLU, pool):
        a, b, c = (nnx.graphdef(layer(codec=k)) for k in (jc.Packed(), jc.Packed(), None))
        assert a == b != c
        assert hash(a) == hash(b)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jc.nn.ReLU(codec=jc.Packed(bits=2)), "expected Packed\\(bits=1\\)"),
        (lambda: jc.nn.ReLU(codec=jc.Quantize()), "not relu"),
        (lambda: jc.nn.MaxPool((5, 5), codec=jc.Packed(bits=4)), "window of 25 values needs more"),
        (lambda: jc.nn.Linear(2, 2, codec=jc.AvgPool(2), rngs=nnx.Rngs(0)), "not dot"),
    ],
)
def test_codecs_that_do_not_fit(make, message):
    with without_type_checks(), pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("codec", ["quantize:bits=2", jc.Quantize])
def test_what_is_no_codec(codec):
    for layer in (jc.nn.ReLU, functools.partial(jc.nn.Linear, 2, 2, rngs=nnx.Rngs(0))):
        with without_type_checks(), pytest.raises(TypeError, match="expected a codec such as"):
            layer(codec=codec)


@pytest.mark.parametrize(
    ("stock", "ours"),
    [
        (nnx.gelu, jc.nn.GELU(codec=jc.Quantize(bits=2))),
        (lambda x: nnx.gelu(x, approximate=False), jc.nn.GELU(False, codec=jc.Quantize(bits=2))),
        (nnx.silu, jc.nn.SiLU(codec=jc.Quantize(bits=2))),
    ],
)
def test_smooth_activations_are_flax_own(stock, ours, assert_same):
    x = jnp.linspace(-4.0, 4.0, 60).reshape(3, 20)
    assert_same(jax.jit(ours)(x), jax.jit(stock)(x))


@pytest.mark.parametrize("rate", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("source", ["constructor", "rngs", "stream", "key"])
def test_dropout_is_flax_own(rate, source, assert_same):
    x = jnp.ones((4, 30))

    def run(kind, **codec):
        rngs = nnx.Rngs(dropout=3)
        layer = kind(rate, rngs=rngs if source == "constructor" else None, **codec)
        given = {"rngs": rngs, "stream": rngs["dropout"], "key": jax.random.key(3)}
        kwargs = {} if source == "constructor" else {"rngs": given[source]}
        return [layer(x, deterministic=False, **kwargs) for _ in range(2)], layer(
            x, deterministic=True, **kwargs
        )

    assert_same(run(jc.nn.Dropout, codec=jc.Packed(bits=1)), run(nnx.Dropout))


def test_dropout_without_numbers_is_an_error():
    with pytest.raises(ValueError, match="rngs: expected some"):
        jc.nn.Dropout(0.5, codec=jc.Packed(bits=1))(jnp.ones(3), deterministic=False)
