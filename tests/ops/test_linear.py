import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from jaxcomp import Cast, Exact, Quantize, ops
from tests.helpers import (
    assert_close,
    assert_same_bits,
    assert_unbiased,
    check_bilinear,
    collectives,
    normal,
    replicate,
    shard,
    slow,
    stored_shapes,
    without_type_checks,
)

MATRIX = (((1,), (0,)), ((), ()))
X, W = normal((16, 12)), normal((12, 5), seed=1)

CASES = {
    "matrix": ((16, 12), (12, 5), {"dimension_numbers": MATRIX}),
    "features": ((2, 3, 4, 12), (12, 5), {"dimension_numbers": (((3,), (0,)), ((), ()))}),
    "batch": ((6, 3, 4), (6, 4, 5), {"dimension_numbers": (((2,), (1,)), ((0,), (0,)))}),
    "two axes": ((2, 3, 4, 6), (4, 3, 5), {"dimension_numbers": (((2, 1), (0, 1)), ((), ()))}),
    "precision": ((16, 12), (12, 5), {"dimension_numbers": MATRIX, "precision": "highest"}),
    "element type": (
        (16, 12),
        (12, 5),
        {"dimension_numbers": MATRIX, "preferred_element_type": jnp.float32},
    ),
    "vector": ((12,), (12, 5), {"dimension_numbers": (((0,), (0,)), ((), ()))}),
}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, jnp.float32) for case in CASES),
        ("features", jnp.bfloat16),
        ("element type", jnp.float16),
        slow("features", jnp.float16),
        slow("element type", jnp.bfloat16),
    ],
)
def test_forward_is_stock_and_backward_is_stock_at_the_decoded_lhs(case, dtype):
    lhs_shape, rhs_shape, kwargs = CASES[case]
    lhs, rhs, codec = normal(lhs_shape, dtype), normal(rhs_shape, dtype, 1), Quantize(2)
    op = functools.partial(ops.dot_general, **kwargs, codec=codec, seed=7)
    decoded = jax.jit(lambda x: codec.decode(codec.encode(x, 7)))(lhs)
    check_bilinear(op, functools.partial(lax.dot_general, **kwargs), lhs, rhs, decoded)


def gradient(codec, seed=None):
    def loss(x, w):
        return jnp.sin(ops.dot_general(x, w, MATRIX, codec=codec, seed=seed)).sum()

    return jax.grad(loss, (0, 1))


def test_exact_codec_gives_the_stock_gradient():
    assert_same_bits(jax.jit(gradient(Exact()))(X, W), jax.jit(gradient(None))(X, W))


def test_no_codec_is_the_stock_operation():
    ours = jax.make_jaxpr(lambda x, w: ops.dot_general(x, w, MATRIX))(X, W)
    assert str(ours) == str(jax.make_jaxpr(lambda x, w: lax.dot_general(x, w, MATRIX))(X, W))


def test_gradient_is_unbiased_over_seeds():
    seeds = jnp.arange(4000)
    draws = jax.jit(jax.vmap(lambda seed: gradient(Quantize(1), seed)(X, W)[1]))(seeds)
    assert_unbiased(draws, jax.jit(gradient(None))(X, W)[1])


def test_the_product_itself_does_not_depend_on_the_seed():
    outs = [ops.dot_general(X, W, MATRIX, codec=Quantize(1), seed=seed) for seed in (None, 1)]
    assert_same_bits(*outs)


def test_vmap_of_grad_equals_a_loop():
    x = normal((6, 4, 12))
    per_sample = gradient(Quantize(2))
    batched = jax.jit(jax.vmap(per_sample, (0, None)))(x, W)
    for i, expected in enumerate(map(jax.jit(per_sample), x, [W] * 6)):
        assert_close(jax.tree.map(lambda g, i=i: g[i], batched), expected)


@pytest.mark.parametrize(
    ("codec", "expected"),
    [
        (Exact(), [((16, 12), "float32")]),
        (Cast(), [((16, 12), "bfloat16")]),
        (Quantize(2), [((16, 1), "float32")] * 2 + [((16, 6), "uint4")]),
    ],
)
def test_stores_the_code_and_the_weights(codec, expected):
    stored = stored_shapes(lambda x, w: ops.dot_general(x, w, MATRIX, codec=codec), X, W)
    assert stored == sorted([*expected, (W.shape, "float32")])


def test_eight_devices_give_the_gradient_of_one():
    x, w = shard(X), replicate(W)
    one, eight = (jax.jit(gradient(Quantize(2)))(*args) for args in [(X, W), (x, w)])
    assert_close(eight, one)
    assert collectives(lambda x, w: gradient(Quantize(2))(x, w)[0], x, w) == set()
    assert collectives(lambda x, w: gradient(Quantize(2))(x, w)[1], x, w) == {"all-reduce"}


def test_injected_in_flax():
    stock = nnx.Linear(12, 5, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    ours = nnx.Linear(
        12,
        5,
        dtype=jnp.bfloat16,
        dot_general=functools.partial(ops.dot_general, codec=Quantize(2)),
        rngs=nnx.Rngs(0),
    )
    call = nnx.jit(lambda layer, x: layer(x))
    assert_same_bits(call(ours, X), call(stock, X))


def test_einsum_accepts_it():
    dot = functools.partial(ops.dot_general, codec=Quantize(2))
    y = jnp.einsum("bi,io->bo", X, W, _dot_general=dot)
    np.testing.assert_allclose(y, X @ W, rtol=1e-5)


def test_integers_are_an_error():
    with without_type_checks(), pytest.raises(TypeError, match="got x of dtype int32"):
        ops.dot_general(X.astype(jnp.int32), W.astype(jnp.int32), MATRIX, codec=Exact())
