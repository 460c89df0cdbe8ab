"""An equivariant interatomic potential that is trained on energies and forces.

Its form is that of PaiNN (arXiv:2102.03150): features are scalars and vectors of atoms. Forces are
the gradient of the energy, so the loss contains a gradient.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from experiments.zoo.scenarios.scenario import Around, Scenario

CUTOFF, RADIAL, KINDS = 5.0, 20, 100  # angstroms, functions of the distance, elements


def dense(params: Any, x: jax.Array) -> jax.Array:
    """Two layers with a SiLU between."""
    return jax.nn.silu(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def interaction(
    params: Any, scalars: jax.Array, vectors: jax.Array, along: Any, ends: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Messages between near atoms, and an update of each atom."""
    radial, directions = along
    senders, receivers = ends
    count = len(scalars)
    weights = dense(params["message"], scalars)[senders] * (radial @ params["filter"])
    new, across, outward = jnp.split(weights, 3, axis=-1)
    moved = vectors[senders] * across[:, None] + outward[:, None] * directions[..., None]
    scalars += jax.ops.segment_sum(new, receivers, count)
    vectors += jax.ops.segment_sum(moved, receivers, count)
    left, right = vectors @ params["left"], vectors @ params["right"]
    norms = jnp.sqrt(jnp.square(right).sum(axis=1) + 1e-8)
    update = dense(params["update"], jnp.concatenate([scalars, norms], axis=-1))
    by_dot, by_scalar, by_vector = jnp.split(update, 3, axis=-1)
    scalars += by_scalar + by_dot * (left * right).sum(axis=1)
    return scalars, vectors + by_vector[:, None] * left


def energy(
    around: Around, params: Any, positions: jax.Array, kinds: jax.Array, ends: jax.Array
) -> jax.Array:
    """The energy of all atoms."""
    offsets = positions[ends[1]] - positions[ends[0]]
    distances = jnp.sqrt(jnp.square(offsets).sum(axis=-1, keepdims=True) + 1e-8)
    waves = jnp.sin(distances * jnp.arange(1, RADIAL + 1) * jnp.pi / CUTOFF) / distances
    inside = 0.5 * (jnp.cos(jnp.pi * jnp.minimum(distances / CUTOFF, 1)) + 1)
    along = waves * inside, offsets / distances
    scalars = params["kinds"][kinds]
    vectors = jnp.zeros((len(scalars), 3, scalars.shape[-1]), scalars.dtype)
    for one in params["layers"]:
        scalars, vectors = around(interaction)(one, scalars, vectors, along, ends)
    return dense(params["out"], scalars).sum()


def loss(
    around: Around, trained: Any, positions: jax.Array, kinds: jax.Array, ends: jax.Array, data: Any
) -> jax.Array:
    """The squared errors of the energy and of the forces."""

    def of_positions(positions: jax.Array) -> jax.Array:
        return energy(around, trained, positions, kinds, ends)

    found, slope = jax.value_and_grad(of_positions)(positions)
    target, forces = data
    return jnp.square(found - target) / len(kinds) + 100 * jnp.square(slope + forces).mean()


def shapes(
    structures: int,
    *,
    atoms: int = 64,
    neighbours: int = 40,
    features: int = 128,
    layers: int = 5,
) -> tuple[Any, ...]:
    """The shapes of the parameters and of a batch of structures, in float32."""

    def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def of_dense(inputs: int, outputs: int) -> Any:
        return {
            "w1": array(inputs, features),
            "b1": array(features),
            "w2": array(features, outputs),
            "b2": array(outputs),
        }

    def of_layer() -> Any:
        return {
            "message": of_dense(features, 3 * features),
            "filter": array(RADIAL, 3 * features),
            "left": array(features, features),
            "right": array(features, features),
            "update": of_dense(2 * features, 3 * features),
        }

    count = structures * atoms
    trained = {
        "kinds": array(KINDS, features),
        "layers": [of_layer() for _ in range(layers)],
        "out": of_dense(features, 1),
    }
    return (
        trained,
        array(count, 3),
        array(count, dtype=jnp.int32),
        array(2, count * neighbours, dtype=jnp.int32),
        (array(), array(count, 3)),
    )


SCENARIO = Scenario(loss, shapes, 64, optax.adamw(1e-4))
