"""Networks of graphs and of points in space."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.helpers import normal
from tests.zoo.losses import cross_entropy
from tests.zoo.networks import of_function, of_nnx

NODES = normal((64, 16))
SENDERS, RECEIVERS = np.random.default_rng(0).integers(0, 64, (2, 256))
LABELS = jnp.arange(64) % 5


def nnx_attention():
    from jraphx.nn.models import GAT

    model = GAT(16, 32, 3, 5, dropout_rate=0.1, norm="batch_norm", heads=2, rngs=nnx.Rngs(0))
    edges = jnp.stack([SENDERS, RECEIVERS])
    return of_nnx(
        model, lambda model, x, edges: cross_entropy(model(x, edges), LABELS), NODES, edges
    )


def haiku_messages():
    import haiku
    import jraph

    def update(features, *others):
        return haiku.nets.MLP((32, 32))(jnp.concatenate([features, *others], axis=-1))

    def forward(graph):
        graph = graph._replace(globals=jnp.zeros((1, 4)))
        network = jraph.GraphNetwork(update, update, update)
        return haiku.Linear(5)(network(network(graph)).nodes)

    graph = jraph.GraphsTuple(
        nodes=NODES,
        edges=normal((256, 8)),
        globals=None,
        senders=jnp.asarray(SENDERS),
        receivers=jnp.asarray(RECEIVERS),
        n_node=jnp.array([64]),
        n_edge=jnp.array([256]),
    )
    model = haiku.without_apply_rng(haiku.transform(forward))
    params = jax.jit(model.init)(jax.random.key(0), graph)
    return of_function(
        lambda params, graph: (cross_entropy(model.apply(params, graph), LABELS), ()), params, graph
    )


def equivariant_transformer():
    import e3nn_jax
    import haiku
    from e3nn_jax.experimental.transformer import Transformer

    def forward(positions):
        vectors = positions[RECEIVERS] - positions[SENDERS]
        length = jnp.linalg.norm(vectors + 1e-3, axis=1)
        edges = e3nn_jax.concatenate(
            [
                e3nn_jax.spherical_harmonics("1o", vectors, True),
                e3nn_jax.soft_one_hot_linspace(
                    length, start=0.0, end=4.0, number=4, basis="gaussian", cutoff=False
                ),
            ]
        )
        nodes = e3nn_jax.IrrepsArray("16x0e", NODES)
        for kind in ("16x0e + 4x1o", "5x0e"):
            layer = Transformer(kind, [16], jax.nn.silu, num_heads=1)
            nodes = layer(SENDERS, RECEIVERS, jnp.ones(256), edges, nodes)
        return nodes.array

    model = haiku.without_apply_rng(haiku.transform(forward))
    positions = normal((64, 3))
    params = jax.jit(model.init)(jax.random.key(0), positions)
    return of_function(
        lambda params, x: (cross_entropy(model.apply(params, x), LABELS), ()), params, positions
    )
