"""Scenarios in small sizes: the loss and the exact gradient do not change, codes have no bias."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import jaxcomp as jc
from experiments.zoo.scenarios.all import SCENARIOS
from experiments.zoo.scenarios.small import LOSSES, SHAPES, arguments
from jaxcomp.planning import Strategy
from tests.helpers import OPTIMIZED, assert_same_bits, distance, kept

NAMES = kept(list(SHAPES), ["robot_policy", "potential"])
DRAWS = 48


@pytest.fixture(autouse=True)
def _as_their_authors_run_them():
    with jax.numpy_rank_promotion("allow"):
        yield


def _gradient(loss, arguments):
    step = jax.jit(jax.value_and_grad(loss), compiler_options=OPTIMIZED)
    value, gradient = step(*arguments)
    return value, ravel_pytree(gradient)[0]


def test_every_scenario_has_a_small_form():
    assert SHAPES.keys() == SCENARIOS.keys()


@pytest.mark.parametrize("name", NAMES)
def test_loss_exact_gradient_and_bias(name):
    given = arguments(name)
    plain = functools.partial(LOSSES[name], lambda block: block)
    remat = functools.partial(LOSSES[name], SCENARIOS[name].remat)
    value, gradient = _gradient(plain, given)
    assert jnp.isfinite(value) and jnp.linalg.norm(gradient) > 0
    for loss in (plain, remat):
        found, exact = _gradient(jc.checkpoint(loss, "exact"), given)
        assert jnp.allclose(found, value, 1e-5)
        assert distance(exact, gradient) < 1e-4

    bits = 8 if name == "potential" else 4  # lengths of short vectors have steep derivatives

    def drawn(seed):
        coded = jc.checkpoint(plain, jc.Quantize(bits=bits), seed=seed)
        coded_value, coded_gradient = jax.value_and_grad(coded)(*given)
        return coded_value, ravel_pytree(coded_gradient)[0]

    values, draws = jax.lax.map(jax.jit(drawn), jnp.arange(DRAWS, dtype=jnp.uint32))
    assert_same_bits(values, jnp.full_like(values, values[0]))
    errors = np.asarray(draws - gradient, np.float64)
    spread = np.linalg.norm(errors, axis=1).mean()
    assert 1e-4 < spread / np.linalg.norm(gradient) < 2
    directions = np.random.default_rng(1).normal(size=(errors.shape[1], 8))
    along = errors @ directions
    z = along.mean(axis=0) / (along.std(axis=0, ddof=1) / DRAWS**0.5)
    assert np.abs(z).max() < 4.5


def test_a_scenario_says_that_its_batch_is_not_divided():
    with pytest.raises(ValueError, match="accumulate:2: a scenario's batch is not divided"):
        SCENARIOS["weather"].make_step(Strategy.parse("accumulate:2"), 1)
