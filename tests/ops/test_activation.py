import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp import ops
from tests.helpers import DTYPES, assert_same_bits, collectives, normal, shard, stored_shapes


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
