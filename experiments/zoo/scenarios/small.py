"""The scenarios in small sizes, in float32, with arrays instead of shapes."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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

_DECODER = gemma.Sizes(depth=2, width=16, heads=2, head=8, hidden=32, rank=2)
_SIGLIP = contrastive.TwoTowers(
    width=16, heads=2, depth=2, vocabulary=32, patch=4, dtype=jnp.float32
)
_CLIP = clip.Clip(width=16, text_width=16, depth=2, vocabulary=32, patch=4, dtype=jnp.float32)
_GRAPH: dict[str, Any] = {
    "latent": 16,
    "rounds": 2,
    "grid": 24,
    "mesh": 12,
    "edges": (30, 40, 48),
}
_OF_POLICY = policy_gradient.shapes(2, length=9, vocabulary=64, sizes=_DECODER)

LOSSES: dict[str, Callable[..., jax.Array]] = {
    **{name: scenario.loss for name, scenario in SCENARIOS.items()},
    "clip": functools.partial(clip.loss, _CLIP),
    "contrastive": functools.partial(contrastive.loss, _SIGLIP),
}
"""The losses, of an `Around`, the trained parameters and the other arguments."""

SHAPES: dict[str, Any] = {
    "pair_stack": pair_stack.shapes(6, blocks=2, channels=8),
    "robot_policy": robot_policy.shapes(
        2, decoder=_DECODER, vocabulary=32, depth=2, width=32, hidden=64, pixels=28, words=4
    ),
    "weather": weather.shapes(1, **_GRAPH),
    "weather_four_steps": weather.shapes(4, **_GRAPH),
    "policy_gradient": _OF_POLICY,
    "policy_gradient_chunked": _OF_POLICY,
    "potential": potential.shapes(2, atoms=6, neighbours=4, features=16, layers=2),
    "contrastive": contrastive.shapes(4, _SIGLIP, pixels=8, words=6),
    "clip": contrastive.shapes(4, _CLIP, pixels=8, words=6),
}


def arguments(name: str) -> tuple[Any, ...]:
    """Returns random arguments of a small form."""
    random = np.random.default_rng(0)

    def of(leaf: Any) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.asarray(random.integers(0, 6, leaf.shape), leaf.dtype)
        values = random.normal(size=leaf.shape) / max(leaf.shape, default=1) ** 0.5
        return jnp.asarray(values, jnp.float32)

    filled = jax.tree.map(of, SHAPES[name])
    if name != "potential":
        return tuple(filled)
    params, positions, kinds, ends, data = filled
    # Atoms are some angstroms apart, and none is its own neighbour.
    ends = jnp.stack([ends[0], (ends[0] + 1 + ends[1] % 5) % 6])
    return params, 2 * positions, kinds, ends, data
