"""A weather forecast by messages between grid points and the nodes of a mesh on the sphere.

Its form is that of GraphCast (arXiv:2212.12794) at 1 degree: one or several steps of 6 hours, each
of which encodes the grid on the mesh, sends messages along the mesh, and decodes them.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from experiments.zoo.scenarios.layers import layer_norm
from experiments.zoo.scenarios.scenario import Around, Scenario

VARIABLES, FEATURES = 83, 4  # of a grid point; of an edge or a node


def network(params: Any, *inputs: jax.Array) -> jax.Array:
    """Two layers with a SiLU between, and a layer norm; the inputs are concatenated."""
    x = jnp.concatenate(inputs, axis=-1)
    x = jax.nn.silu(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]
    return layer_norm(params, x)


def messages(
    params: Any, edges: jax.Array, senders: jax.Array, receivers: jax.Array, ends: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """New edges and receivers: along each edge of `ends` goes a message, and each node adds up."""
    new = network(params["edges"], edges, senders[ends[0]], receivers[ends[1]])
    total = jax.ops.segment_sum(new, ends[1], len(receivers))
    return edges + new, receivers + network(params["nodes"], receivers, total)


def forecast(around: Around, params: Any, graph: Any, state: jax.Array) -> jax.Array:
    """The state of the grid six hours later."""
    step, ends = around(messages), graph["ends"]
    edges = {name: network(params["embed"][name], x) for name, x in graph["edges"].items()}
    grid = around(network)(params["grid"], state)
    mesh = network(params["nodes"], graph["nodes"])
    _, mesh = step(params["to_mesh"], edges["to_mesh"], grid, mesh, ends["to_mesh"])
    along = edges["mesh"]
    for one in params["mesh"]:
        along, mesh = step(one, along, mesh, mesh, ends["mesh"])
    _, grid = step(params["to_grid"], edges["to_grid"], mesh, grid, ends["to_grid"])
    return state + grid @ params["out"]


def loss(around: Around, trained: Any, graph: Any, states: jax.Array) -> jax.Array:
    """The mean squared error of a forecast of one or several steps.

    Args:
        around: Put around each step of messages, and around each forecast if there are several.
        trained: The parameters, in float32.
        graph: Edges and nodes.
        states: Of the grid, at the beginning and after each step.
    """
    params = jax.tree.map(lambda w: w.astype(states.dtype), trained)
    one: Callable[..., jax.Array] = functools.partial(forecast, around)
    if len(states) > 2:
        one = around(one)

    def step(state: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = one(params, graph, state)
        return state, jnp.square((state - target).astype(jnp.float32)).mean()

    _, errors = jax.lax.scan(step, states[0], states[1:])
    return errors.mean()


def shapes(
    steps: int,
    *,
    latent: int = 512,
    rounds: int = 16,
    grid: int = 181 * 360,
    mesh: int = 10_242,
    edges: tuple[int, int, int] = (101_000, 81_900, 3 * 181 * 360),
) -> tuple[Any, ...]:
    """The shapes of the parameters, of the graph and of the states, of a number of steps."""

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def of_network(inputs: int) -> dict[str, jax.ShapeDtypeStruct]:
        wide = {"w1": (inputs, latent), "w2": (latent, latent)}
        narrow = dict.fromkeys(("b1", "b2", "scale", "offset"), (latent,))
        return {name: array(*shape, dtype=jnp.float32) for name, shape in (wide | narrow).items()}

    def of_messages() -> Any:
        return {"edges": of_network(3 * latent), "nodes": of_network(2 * latent)}

    names = "to_mesh", "mesh", "to_grid"
    counts = dict(zip(names, edges, strict=True))
    trained = {
        "embed": {name: of_network(FEATURES) for name in names},
        "grid": of_network(VARIABLES),
        "nodes": of_network(FEATURES),
        "to_mesh": of_messages(),
        "mesh": [of_messages() for _ in range(rounds)],
        "to_grid": of_messages(),
        "out": array(latent, VARIABLES, dtype=jnp.float32),
    }
    graph = {
        "ends": {name: array(2, n, dtype=jnp.int32) for name, n in counts.items()},
        "edges": {name: array(n, FEATURES) for name, n in counts.items()},
        "nodes": array(mesh, FEATURES),
    }
    return trained, graph, array(steps + 1, grid, VARIABLES)


ONE_STEP = Scenario(loss, shapes, 1, optax.adamw(1e-4))
FOUR_STEPS = Scenario(loss, shapes, 4, optax.adamw(1e-4))
