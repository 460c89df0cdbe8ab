"""Long chains of steps: work and programs grow with their length, and no recursion overflows."""

import jax
import jax.numpy as jnp
import pytest

import jaxcomp as jc
from tests.helpers import assert_close, normal, slow

X, W = normal((16, 16)), 0.1 * normal((16, 16), seed=1)
POLICIES = (jc.Quantize(bits=4), jax.checkpoint_policies.nothing_saveable)


def elementwise(steps):
    def chain(x, w):
        for _ in range(steps):
            x = jnp.sin(x * w) + x
        return x.sum()

    return chain


def products(steps):
    def chain(x, w):
        for _ in range(steps):
            x = jnp.tanh(x @ w + x)
        return x.sum()

    return chain


def gradient(fn):
    return jax.grad(fn, (0, 1))


@pytest.mark.parametrize(
    ("make", "steps", "policy"),
    [
        (elementwise, 200, POLICIES[1]),
        (products, 80, POLICIES[0]),
        slow(elementwise, 300, POLICIES[0]),
        slow(products, 80, POLICIES[1]),
    ],
)
def test_programs_grow_with_the_length_of_a_chain(make, steps, policy):
    def equations(steps):
        return len(jax.make_jaxpr(gradient(jc.checkpoint(make(steps), policy)))(X, W).eqns)

    assert equations(steps) < 4.5 * equations(steps // 4)


def test_a_chain_of_several_segments_has_its_gradient():
    """Of exact values, which are recomputed; every step at most twice."""
    ours, stock = jc.checkpoint(elementwise(60), POLICIES[1]), elementwise(60)
    assert_close(jax.jit(gradient(ours))(X, W), jax.jit(gradient(stock))(X, W))
    sines = str(jax.make_jaxpr(gradient(ours))(X, W)).count(" = sin ")
    assert sines <= 3 * 60  # of the forward pass, and twice in the backward pass


def test_codes_of_a_long_chain_are_unbiased_enough():
    """Affine steps after a code are shared by which of its codes they come from."""

    def chain(x, w):
        h = jnp.tanh(x @ w)
        for _ in range(100):
            h = 1.001 * h + 0.01
        return ((h @ w) ** 2).sum()

    ours = jax.jit(gradient(jc.checkpoint(chain, jc.Quantize(bits=8))))(X, W)
    assert_close(ours, jax.jit(gradient(chain))(X, W), 0.05)
