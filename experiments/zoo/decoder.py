"""A decoder of 8 billion parameters as functions of arrays, under `scan`, with sharded parameters.

The sizes are those of Llama 3 8B. The code uses nothing of jaxcomp: what is done about the
activations of a layer is given as a transformation of the layer.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxcomp.models._lm import attend

Weights = dict[str, Any]
Layer = Callable[[Weights, jax.Array], jax.Array]

NAMES = ("qkv", "context", "gate", "up")  # of the values of a layer
_TOKENS = 512  # of which the logits are computed at once


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder.

    Attributes:
        layers: Number of layers.
        width: Features of a token.
        hidden: Features within a feed-forward network.
        heads: Heads of queries.
        kv_heads: Heads of keys and values.
        vocabulary: Number of tokens.
        length: Tokens of a sequence.
        queries: That attend at once.
        again: Whether the feed-forward networks are computed again in the backward pass.
    """

    layers: int = 32
    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 128256
    length: int = 4096
    queries: int = 512
    again: bool = False


def weight_shapes(sizes: Sizes) -> Weights:
    """The shapes of the float32 parameters; those of all layers are stacked."""
    features = sizes.width // sizes.heads
    of_layer = {
        "norm1": (sizes.width,),
        "qkv": (sizes.width, (sizes.heads + 2 * sizes.kv_heads) * features),
        "out": (sizes.width, sizes.width),
        "norm2": (sizes.width,),
        "gate": (sizes.width, sizes.hidden),
        "up": (sizes.width, sizes.hidden),
        "down": (sizes.hidden, sizes.width),
    }
    shapes = {
        "embed": (sizes.vocabulary, sizes.width),
        "layers": {name: (sizes.layers, *shape) for name, shape in of_layer.items()},
        "norm": (sizes.width,),
        "head": (sizes.width, sizes.vocabulary),
    }
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        shapes,
        is_leaf=lambda shape: isinstance(shape, tuple),
    )


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMS norm, computed in float32."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)
    return (wide * scale).astype(x.dtype)


def layer(sizes: Sizes, gathered: NamedSharding, weights: Weights, x: jax.Array) -> jax.Array:
    """A layer; its parameters are gathered where they are used.

    Each product adds its low-rank adapter if `weights["adapters"]` has one.
    """
    adapters = weights.get("adapters", {})

    def product(x: jax.Array, name: str) -> jax.Array:
        weight = weights[name].astype(x.dtype)
        y = x @ jax.lax.with_sharding_constraint(weight, gathered)
        if name not in adapters:
            return y
        down, up = (matrix.astype(x.dtype) for matrix in adapters[name])
        return y + (x @ down) @ up

    features = sizes.width // sizes.heads
    qkv = checkpoint_name(product(norm(x, weights["norm1"]), "qkv"), "qkv")
    heads = qkv.reshape(*x.shape[:2], -1, features)
    q, k, v = jnp.split(heads, (sizes.heads, sizes.heads + sizes.kv_heads), axis=2)
    mixed = jax.checkpoint(attend, static_argnums=(3, 4))(q, k, v, True, sizes.queries)
    context = checkpoint_name(mixed.reshape(x.shape), "context")
    x = x + product(context, "out")

    def feed_forward(y: jax.Array) -> jax.Array:
        gate = checkpoint_name(product(y, "gate"), "gate")
        up = checkpoint_name(product(y, "up"), "up")
        return product(jax.nn.silu(gate) * up, "down")

    y = norm(x, weights["norm2"])
    return x + (jax.checkpoint(feed_forward) if sizes.again else feed_forward)(y)


def loss(
    sizes: Sizes,
    mesh: Mesh | AbstractMesh,
    around: Callable[[Layer], Layer],
    weights: Weights,
    tokens: jax.Array,
) -> jax.Array:
    """The mean cross-entropy of the next tokens; logits are computed in parts, and again."""
    gathered = NamedSharding(mesh, PartitionSpec())
    by_example = NamedSharding(mesh, PartitionSpec("data"))

    def run(weights: Weights, x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(layer(sizes, gathered, weights, x), by_example)

    once = around(run)
    embed = jax.lax.with_sharding_constraint(weights["embed"].astype(jnp.bfloat16), gathered)
    x = jax.lax.with_sharding_constraint(embed[tokens], by_example)
    x, _ = jax.lax.scan(lambda x, layer: (once(layer, x), None), x, weights["layers"])
    x = norm(x, weights["norm"])
    head = jax.lax.with_sharding_constraint(weights["head"].astype(x.dtype), gathered)

    @jax.checkpoint
    def part(total: jax.Array, start: jax.Array) -> tuple[jax.Array, None]:
        some = jax.lax.dynamic_slice_in_dim(x, start, _TOKENS, axis=1)
        labels = jax.lax.dynamic_slice_in_dim(jnp.roll(tokens, -1, 1), start, _TOKENS, axis=1)
        logits = (some @ head).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return total + losses.sum(), None

    total, _ = jax.lax.scan(part, jnp.zeros(()), jnp.arange(0, sizes.length, _TOKENS))
    return total / tokens.size


def make_step(
    sizes: Sizes, mesh: Mesh | AbstractMesh, around: Callable[[Layer], Layer]
) -> tuple[Callable[..., Any], Weights, optax.GradientTransformation]:
    """An AdamW step of weights, the optimizer's state and tokens; the weights' shapes."""
    optimizer = optax.adamw(1e-4)

    def step(weights: Weights, state: Any, tokens: jax.Array) -> tuple[Weights, Any]:
        grads = jax.grad(lambda weights: loss(sizes, mesh, around, weights, tokens))(weights)
        updates, state = optimizer.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state

    return step, weight_shapes(sizes), optimizer
