"""Scenarios in small sizes: the loss and the exact gradient do not change, codes have no bias."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import jaxcomp as jc
from experiments.zoo.scenarios import (
    clip,
    contrastive,
    gemma,
    pair_stack,
    policy_gradient,
    potential,
    robot_policy,
    weather,
)
from experiments.zoo.scenarios.all import SCENARIOS
from jaxcomp.planning import Strategy
from tests.helpers import OPTIMIZED, assert_same_bits, distance, kept

DECODER = gemma.Sizes(depth=2, width=16, heads=2, head=8, hidden=32, rank=2)
TOWERS = contrastive.TwoTowers(
    width=16, heads=2, depth=2, vocabulary=32, patch=4, dtype=jnp.float32
)
GRAPH = {"latent": 16, "rounds": 2, "grid": 24, "mesh": 12, "edges": (30, 40, 48)}
OF_TOWERS = functools.partial(contrastive.shapes, model=TOWERS, pixels=8, words=6)
SMALL = {
    "pair_stack": pair_stack.shapes(6, blocks=2, channels=8),
    "robot_policy": robot_policy.shapes(
        2, decoder=DECODER, vocabulary=32, depth=2, width=32, hidden=64, pixels=28, words=4
    ),
    "weather": weather.shapes(1, **GRAPH),
    "weather_four_steps": weather.shapes(4, **GRAPH),
    "policy_gradient": policy_gradient.shapes(2, length=9, vocabulary=64, sizes=DECODER),
    "policy_gradient_chunked": policy_gradient.shapes(2, length=9, vocabulary=64, sizes=DECODER),
    "potential": potential.shapes(2, atoms=6, neighbours=4, features=16, layers=2),
    "contrastive": OF_TOWERS(4),
}
CLIP = clip.Clip(width=16, text_width=16, depth=2, vocabulary=32, patch=4, dtype=jnp.float32)
SMALL["clip"] = contrastive.shapes(4, CLIP, pixels=8, words=6)
LOSSES = {name: scenario.loss for name, scenario in SCENARIOS.items()}
LOSSES["clip"] = functools.partial(clip.loss, CLIP)
LOSSES["contrastive"] = functools.partial(contrastive.loss, TOWERS)
NAMES = kept(list(SMALL), ["robot_policy", "potential"])
DRAWS = 48


@pytest.fixture(autouse=True)
def _as_their_authors_run_them():
    with jax.numpy_rank_promotion("allow"):
        yield


def _filled(shapes):
    """Arrays in float32 of these shapes; integers are small."""
    random = np.random.default_rng(0)

    def of(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.asarray(random.integers(0, 6, leaf.shape), leaf.dtype)
        return jnp.asarray(random.normal(size=leaf.shape) / max(leaf.shape, default=1) ** 0.5)

    with jax.enable_x64(False):
        return jax.tree.map(of, shapes)


def _gradient(loss, arguments):
    step = jax.jit(jax.value_and_grad(loss), compiler_options=OPTIMIZED)
    value, gradient = step(*arguments)
    return value, ravel_pytree(gradient)[0]


def test_every_scenario_has_a_small_form():
    assert SMALL.keys() == SCENARIOS.keys()


@pytest.mark.parametrize("name", NAMES)
def test_loss_exact_gradient_and_bias(name):
    arguments = _filled(SMALL[name])
    if name == "potential":  # some angstroms apart, and no atom is its own neighbour
        params, positions, kinds, ends, data = arguments
        ends = jnp.stack([ends[0], (ends[0] + 1 + ends[1] % 5) % 6])
        arguments = params, 2 * positions, kinds, ends, data
    plain = functools.partial(LOSSES[name], lambda block: block)
    remat = functools.partial(LOSSES[name], SCENARIOS[name].remat)
    value, gradient = _gradient(plain, arguments)
    assert jnp.isfinite(value) and jnp.linalg.norm(gradient) > 0
    for loss in (plain, remat):
        found, exact = _gradient(jc.checkpoint(loss, "exact"), arguments)
        assert jnp.allclose(found, value, 1e-5)
        assert distance(exact, gradient) < 1e-4

    bits = 8 if name == "potential" else 4  # lengths of short vectors have steep derivatives

    def drawn(seed):
        coded = jc.checkpoint(plain, jc.Quantize(bits=bits), seed=seed)
        coded_value, coded_gradient = jax.value_and_grad(coded)(*arguments)
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
