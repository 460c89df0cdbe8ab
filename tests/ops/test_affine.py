import functools

import jax
import jax.numpy as jnp
import pytest

from jaxcomp import BlockSparse, Exact, Quantize, ops
from tests.helpers import (
    DTYPES,
    assert_same_bits,
    assert_unbiased,
    check_bilinear,
    collectives,
    kept,
    normal,
    replicate,
    shard,
    stored_shapes,
)

X, SCALE, BIAS = normal((16, 6, 8)), normal((8,), seed=1), normal((8,), seed=2)


def stock(x, scale, bias=None):
    y = x * scale.reshape(1, 1, -1)
    return y if bias is None else y + bias.reshape(1, 1, -1)


@pytest.mark.parametrize("codec", [Quantize(2), BlockSparse(2, 0.5)], ids=str)
@pytest.mark.parametrize("dtype", kept(DTYPES, DTYPES[:2]))
def test_forward_is_stock_and_backward_is_stock_at_the_decoded_input(codec, dtype):
    x, scale = X.astype(dtype), SCALE.astype(dtype)
    decoded = jax.jit(lambda x: codec.decode(codec.encode(x, 7)))(x)
    op = functools.partial(ops.affine, codec=codec, seed=7)
    check_bilinear(op, stock, x, scale, decoded)


@pytest.mark.parametrize("codec", [None, Exact(), Quantize(2)], ids=str)
def test_bias(codec):
    op = functools.partial(ops.affine, codec=codec)
    assert_same_bits(jax.jit(op)(X, SCALE, BIAS), jax.jit(stock)(X, SCALE, BIAS))
    gradient = [
        jax.jit(jax.grad(lambda b, f=f: (f(X, SCALE, b) ** 2).sum()))(BIAS) for f in (op, stock)
    ]
    assert_same_bits(*gradient)


def test_stores_the_code_and_the_scale():
    stored = stored_shapes(functools.partial(ops.affine, codec=Quantize(4)), X, SCALE, BIAS)
    assert stored == [((8,), "float32"), *[((16, 1, 1), "float32")] * 2, ((16, 6, 8), "uint4")]


def test_gradient_is_unbiased_over_seeds():
    def gradient(codec, seed):
        return jax.grad(lambda s: jnp.sin(ops.affine(X, s, codec=codec, seed=seed)).sum())(SCALE)

    draws = jax.jit(jax.vmap(functools.partial(gradient, Quantize(1))))(jnp.arange(2000))
    assert_unbiased(draws, gradient(None, None))


def test_only_the_scale_s_gradient_is_summed_over_devices():
    def gradients(x, scale):
        return jax.grad(lambda x, s: (ops.affine(x, s, codec=Quantize(2)) ** 2).sum(), (0, 1))(
            x, scale
        )

    x, scale = shard(X), replicate(SCALE)
    assert collectives(lambda x, s: gradients(x, s)[0], x, scale) == set()
    assert collectives(lambda x, s: gradients(x, s)[1], x, scale) == {"all-reduce"}


def test_a_scale_of_a_weak_type_is_summed_in_its_own_dtype():
    x, scale = jnp.ones((4096, 4), jnp.bfloat16), jnp.full((4,), 0.1)
    assert jax.typeof(scale).weak_type

    def loss(scale):
        return ops.affine(x, scale, codec=Exact()).sum(dtype=jnp.float32)

    assert jax.grad(loss)(scale).tolist() == [4096.0] * 4
