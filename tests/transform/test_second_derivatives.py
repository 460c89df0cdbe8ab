"""Where nothing is coded, a function has second derivatives: those of its own rules."""

import jax
import jax.numpy as jnp
import pytest

import jaxcomp as jc
from tests.helpers import assert_close

POLICIES = (
    jc.Exact(),
    jax.checkpoint_policies.nothing_saveable,
    jax.checkpoint_policies.everything_saveable,
)
W = jnp.linspace(-1, 1, 9).reshape(3, 3)


@jax.custom_jvp
def rounded(x):
    return jnp.round(4 * x) / 4


@rounded.defjvp
def _straight_through(primals, tangents):
    return rounded(*primals), tangents[0] * (1 + primals[0])


@jax.custom_jvp
def mixed(x):
    return jnp.sin(x @ W)


@mixed.defjvp
def _other_derivative(primals, tangents):
    return mixed(*primals), 2 * jnp.cos(primals[0] @ W) * (tangents[0] @ W)


FUNCTIONS = {
    "a rule of cheap steps": lambda x: x * rounded(x) ** 2,
    "a rule with a product": lambda x: x * mixed(x),
    "rules of JAX": lambda x: jnp.sin(x) * jnp.sinc(x) * jax.nn.softplus(x) * jax.nn.relu(x),
    "ties": lambda x: x * jnp.maximum(x, 0.0) * jnp.clip(x, -0.5, 0.5),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("policy", POLICIES)
def test_second_derivatives_are_the_functions_own(name, policy):
    x = jnp.array([[-1.0, -0.5, 0.0], [0.1, 0.5, 2.0]])

    def second(fn):
        slope = jax.grad(lambda x: jnp.sum(fn(x)))
        return jax.jit(jax.grad(lambda x: jnp.sum(slope(x) ** 2)))(x)

    fn = FUNCTIONS[name]
    assert_close(second(jc.checkpoint(fn, policy)), second(fn))
