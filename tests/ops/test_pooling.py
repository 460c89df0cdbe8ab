import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxcomp import Packed, ops
from tests.helpers import DTYPES, assert_same_bits, collectives, normal, shard, slow, stored_shapes


def pull(fn):
    return jax.jit(lambda x, dy: (lambda y, vjp: (y, *vjp(dy)))(*jax.vjp(fn, x)))


def hard_values(shape, dtype):
    """A batch of four: distinct values, ties, NaN among them, mostly -Inf."""
    x = np.array(normal((4, *shape)))
    draw = np.random.default_rng(1).random(x.shape)
    x[1] = np.round(x[1])
    x[2] = np.where(draw[2] < 0.1, np.nan, x[2])
    x[3] = np.where(draw[3] < 0.6, -np.inf, x[3])
    return jnp.asarray(x.astype(dtype))


CASES = [
    ((8, 7, 3), (2, 2), (2, 2), "VALID"),
    ((8, 7, 3), (3, 3), (2, 2), "SAME"),
    ((8, 7, 3), (3, 3), None, "VALID"),  # up to nine windows share an element
    ((8, 7, 3), (2, 3), (1, 4), ((1, 0), (2, 1))),  # strides with gaps
    ((4, 4, 3), (2, 2), (2, 2), ((3, 3), (2, 2))),  # windows of nothing but padding
    ((11, 3), (4,), (3,), "SAME"),
    ((4, 5, 6, 2), (2, 2, 2), (1, 2, 1), "VALID"),
]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, jnp.float32) for case in CASES), (CASES[1], DTYPES[1]), slow(CASES[1], DTYPES[2])],
)
def test_max_pool_has_the_bits_of_stock(case, dtype):
    shape, window, strides, padding = case
    x = hard_values(shape, dtype)
    codec = Packed(bits=4)

    def ours(x):
        return ops.max_pool(x, window, strides, padding, codec=codec)

    def stock(x):
        return nnx.max_pool(x, window, strides, padding)

    out = jax.jit(stock)(x)
    assert_same_bits(jax.jit(ours)(x), out)
    dy = normal(out.shape, dtype, 2)
    assert_same_bits(pull(ours)(x, dy), pull(stock)(x, dy))


def test_max_pool_stores_packed_indices():
    x = jnp.ones((2, 8, 8, 4))
    stored = stored_shapes(lambda x: ops.max_pool(x, (2, 2), (2, 2), codec=Packed(bits=2)), x)
    assert stored == [((2, 4, 4, 2), "uint4")]
    stored = stored_shapes(lambda x: ops.max_pool(x, (3, 3), (2, 2), "SAME"), x)
    assert stored == [((2, 4, 4, 4), "uint4")]


@pytest.mark.parametrize(
    ("bits", "window"), [(1, (2,)), (2, (2, 2)), (3, (2, 2, 2)), (4, (4, 4)), (8, (5, 5))]
)
def test_max_pool_finds_the_last_of_a_window(bits, window):
    shape = (1, *(2 * n for n in window), 1)
    x = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    dx = jax.jit(jax.grad(lambda x: ops.max_pool(x, window, window, codec=Packed(bits)).sum()))(x)
    last = np.ix_([0], *([n - 1, 2 * n - 1] for n in window), [0])
    expected = np.zeros(shape)
    expected[last] = 1
    np.testing.assert_array_equal(dx, expected)


def test_max_pool_vmap_equals_the_whole():
    x, dy = normal((4, 2, 6, 6, 3)), normal((4, 2, 3, 3, 3), seed=1)
    op = pull(lambda x: ops.max_pool(x, (2, 2), (2, 2)))
    batched = jax.jit(jax.vmap(op))(x, dy)
    whole = op(x.reshape(8, 6, 6, 3), dy.reshape(8, 3, 3, 3))
    assert_same_bits(jax.tree.map(lambda a: a.reshape(8, *a.shape[2:]), batched), whole)


def test_max_pool_on_eight_devices_does_not_communicate():
    x, dy = normal((16, 6, 6, 3)), normal((16, 3, 3, 3), seed=1)
    op = pull(lambda x: ops.max_pool(x, (2, 2), (2, 2)))
    assert collectives(op, shard(x), shard(dy)) == set()
    assert_same_bits(op(shard(x), shard(dy)), op(x, dy))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"strides": (2,)}, r"strides=\(2,\): expected a positive one"),
        ({"strides": (0, 1)}, r"strides=\(0, 1\): expected a positive one"),
        ({"padding": [(0, 0)]}, r"padding=\[\(0, 0\)\]: expected \(low, high\)"),
        ({"padding": [(-1, 0), (0, 0)]}, "expected \\(low, high\\) for each of"),
    ],
)
def test_strides_and_padding_that_do_not_fit_are_an_error(kwargs, message):
    with pytest.raises(ValueError, match=message):
        ops.max_pool(jnp.ones((1, 4, 4, 1)), (2, 2), **kwargs)


def test_a_window_of_one_element_is_the_identity():
    x = normal((2, 4, 4, 8))
    y, pull = jax.vjp(lambda x: ops.max_pool(x, (1, 1)), x)
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(pull(x)[0], x)
