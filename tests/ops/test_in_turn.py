import functools

import jax
import jax.numpy as jnp
import pytest

from jaxcomp.ops import in_turn
from tests.helpers import assert_same_bits, normal


def block(x, turns):
    h, shortcut = jnp.cos(x), jnp.sin(x)
    if turns:
        h, shortcut = in_turn(h, shortcut)
    return jnp.tanh(h) + shortcut


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.checkpoint])
def test_values_and_gradients_are_unchanged(transform):
    def run(turns):
        f = transform(functools.partial(block, turns=turns))
        return jax.value_and_grad(lambda x: f(x).sum())(normal((4, 5)))

    assert_same_bits(run(True), run(False))


def test_the_second_cotangent_waits_for_the_first():
    _, pull = jax.vjp(lambda a, b: in_turn(a, b), jnp.ones(2), jnp.ones(3))
    (equation,) = [
        e
        for e in jax.make_jaxpr(pull)((jnp.ones(2), jnp.ones(3))).eqns
        if e.primitive.name == "optimization_barrier"
    ]
    assert [v.aval.shape for v in equation.invars] == [(2,), (3,)]
