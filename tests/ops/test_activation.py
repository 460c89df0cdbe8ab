import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxcomp import Exact, Float8, Quantize, ops
from tests.helpers import (
    DTYPES,
    assert_close,
    assert_same_bits,
    assert_unbiased,
    collectives,
    kept,
    normal,
    shard,
    stored_shapes,
    without_type_checks,
)


def pull(fn):
    return jax.jit(lambda x, dy: (lambda y, vjp: (y, *vjp(dy)))(*jax.vjp(fn, x)))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((shape, jnp.float32) for shape in [(), (7,), (3, 5), (2, 5, 6, 3)]),
        *(((3, 5), dtype) for dtype in DTYPES[1:]),
    ],
)
def test_result_and_gradient_have_the_bits_of_stock(shape, dtype):
    x = np.array(normal(shape, dtype))
    special = [0.0, -0.0, np.nan, np.inf, -np.inf]
    if x.size > 5:
        x.flat[:5] = special
    x, dy = jnp.asarray(x), normal(shape, dtype, 1)
    assert_same_bits(jax.jit(ops.relu)(x), jax.jit(jax.nn.relu)(x))
    assert_same_bits(pull(ops.relu)(x, dy), pull(jax.nn.relu)(x, dy))


def test_stores_one_bit_per_element():
    assert stored_shapes(ops.relu, jnp.ones((4, 16, 3))) == [((4, 16, 1), "uint8")]


def test_vmap_equals_the_whole():
    x, dy = normal((4, 5, 6)), normal((4, 5, 6), seed=1)
    assert_same_bits(jax.jit(jax.vmap(pull(ops.relu)))(x, dy), pull(ops.relu)(x, dy))


def test_eight_devices_do_not_communicate():
    x, dy = shard(normal((16, 7, 7, 5))), shard(normal((16, 7, 7, 5), seed=1))
    assert collectives(pull(ops.relu), x, dy) == set()
    assert_same_bits(pull(ops.relu)(x, dy), pull(jax.nn.relu)(x, dy))


def test_second_derivative_is_that_of_stock():
    def second(fn):
        gradient = jax.grad(lambda x: (fn(x) ** 3).sum())
        return jax.jit(lambda x: jax.jvp(gradient, (x,), (x,)))(normal((3, 5)))

    assert_same_bits(second(ops.relu), second(jax.nn.relu))


SMOOTH = {
    "gelu": (ops.gelu, jax.nn.gelu),
    "exact gelu": (
        functools.partial(ops.gelu, approximate=False),
        functools.partial(jax.nn.gelu, approximate=False),
    ),
    "silu": (ops.silu, jax.nn.silu),
}


BOUNDS = {"gelu": (-0.13, 1.13), "exact gelu": (-0.13, 1.13), "silu": (-0.11, 1.11)}


SMOOTH_CASES = [
    # The rounding of one element is that of optimized programs; see conftest.py.
    pytest.param(jnp.float32, "gelu", marks=pytest.mark.slow),
    *((jnp.float32, case) for case in SMOOTH if case != "gelu"),
    *kept(itertools.product(DTYPES[1:], SMOOTH), [*zip(DTYPES[1:], SMOOTH, strict=False)]),
]


@pytest.mark.parametrize(("dtype", "case"), SMOOTH_CASES)
def test_smooth_activations_keep_their_derivative(case, dtype):
    op, stock = SMOOTH[case]
    x = jnp.linspace(-6, 6, 120).reshape(4, 5, 6).astype(dtype)  # with the derivative's extremes
    dy = normal((4, 5, 6), dtype, 1)
    codec = Quantize(bits=4)
    coded = functools.partial(op, codec=codec, seed=3)
    assert_same_bits(jax.jit(coded)(x), jax.jit(stock)(x))
    wide = x.astype(jnp.float32)
    derivative = jax.jvp(stock, (wide,), (jnp.ones_like(wide),))[1].astype(dtype)
    assert BOUNDS[case][0] <= derivative.min() and derivative.max() <= BOUNDS[case][1]
    decoded = codec.decode(codec.encode_within(derivative, *BOUNDS[case], 3))
    rtol = 4 * float(jnp.finfo(dtype).eps)
    # A derivative that is rounded otherwise may have its code rounded otherwise.
    _, pull_coded = jax.vjp(coded, x)
    assert_close(pull_coded(dy)[0], dy * decoded, rtol)
    exact = pull(functools.partial(op, codec=Exact()))(x, dy)
    assert_close(exact, (stock(x), dy * derivative), rtol)
    if dtype != jnp.float16:  # where stock's own gradient cancels, by several bits on some CPUs
        assert_close(exact, pull(stock)(x, dy), rtol)
    (stored,) = {name for shape, name in stored_shapes(coded, x) if shape == x.shape}
    assert stored == "uint4"


def test_gradient_of_a_smooth_activation_is_unbiased():
    x = jnp.linspace(-3.0, 3.0, 42).reshape(2, 21)

    def gradient(seed):
        return jax.grad(lambda x: ops.gelu(x, codec=Quantize(bits=1), seed=seed).sum())(x)

    draws = jax.jit(jax.vmap(gradient))(jnp.arange(2000))
    exact = jax.jit(jax.vmap(jax.vmap(jax.grad(jax.nn.gelu))))(x)
    noisy = np.ptp(np.asarray(draws), axis=0) > 0  # not the extremes, which are stored
    assert noisy.sum() > 30
    assert_unbiased(np.asarray(draws)[:, noisy], exact[noisy])


@pytest.mark.parametrize("broadcast", [(), (1, 2)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_has_the_bits_of_flax(broadcast, dtype):
    x, dy = normal((4, 5, 6, 3), dtype), normal((4, 5, 6, 3), dtype, 1)
    key = jax.random.key(7)
    layer = nnx.Dropout(0.3, broadcast_dims=broadcast, deterministic=False)

    def ours(x):
        return ops.dropout(x, key, 0.3, broadcast)

    def stock(x):
        return layer(x, rngs=key)

    assert_same_bits(pull(ours)(x, dy), pull(stock)(x, dy))
    (shape, name) = stored_shapes(ours, x)[0]
    assert name == "uint8" and np.prod(shape) <= x.size // 3


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_dropout_of_all_is_an_error(rate):
    with without_type_checks(), pytest.raises(ValueError, match=f"rate={rate}: expected"):
        ops.dropout(jnp.ones(3), jax.random.key(0), rate)


@pytest.mark.parametrize("codec", [Quantize(4), Float8()])
def test_second_derivatives_through_a_code_are_an_error(codec):
    """Also where all arrays of the code are integers, which have no tangents."""

    def slope(x):
        return jax.grad(lambda x: ops.gelu(x, codec=codec).sum())(x).sum()

    with pytest.raises(NotImplementedError, match="second derivatives"):
        jax.grad(slope)(normal((4, 64)))
