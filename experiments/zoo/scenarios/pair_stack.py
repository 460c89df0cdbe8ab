"""A stack of triangle products and attentions over pairs of residues, in functions.

Its form is that of AlphaFold's pair stack (Jumper et al. 2021, supplement 1.6.5 to 1.6.7): the
weights are frozen, and a protein is designed by the gradient of its sequence's logits.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from experiments.zoo.scenarios.layers import layer_norm
from experiments.zoo.scenarios.scenario import Around, Scenario

Params = dict[str, Any]
Block = Callable[[Params, jax.Array], jax.Array]

HEADS, WIDER, KINDS = 4, 4, 20


def linear(params: Params, x: jax.Array) -> jax.Array:
    """A product with a matrix, and a bias."""
    return x @ params["w"] + params["b"]


def triangle_product(params: Params, pair: jax.Array, *, outgoing: bool) -> jax.Array:
    """Algorithms 11 and 12: edges from (or to) a pair of nodes, multiplied and summed."""
    x = layer_norm(params["norm"], pair)
    left = jax.nn.sigmoid(linear(params["left_gate"], x)) * linear(params["left"], x)
    right = jax.nn.sigmoid(linear(params["right_gate"], x)) * linear(params["right"], x)
    equation = "ikc,jkc->ijc" if outgoing else "kic,kjc->ijc"
    product = jnp.einsum(equation, left, right) / left.shape[0] ** 0.5
    out = linear(params["out"], layer_norm(params["center_norm"], product))
    return out * jax.nn.sigmoid(linear(params["gate"], x))


def triangle_attention(params: Params, pair: jax.Array, *, starting: bool) -> jax.Array:
    """Algorithms 13 and 14: each row (or column) attends to itself, biased by the third edge."""
    if not starting:
        pair = pair.swapaxes(0, 1)
    x = layer_norm(params["norm"], pair)
    split = (*x.shape[:2], HEADS, x.shape[-1] // HEADS)
    q, k, v = (linear(params[name], x).reshape(split) for name in ("q", "k", "v"))
    bias = linear(params["bias"], x).transpose(2, 0, 1)
    scores = jnp.einsum("rihc,rjhc->rhij", q, k) * split[-1] ** -0.5
    weights = jax.nn.softmax(scores.astype(jnp.float32) + bias, axis=-1).astype(x.dtype)
    mixed = jnp.einsum("rhij,rjhc->rihc", weights, v).reshape(x.shape)
    out = linear(params["out"], mixed * jax.nn.sigmoid(linear(params["gate"], x)))
    return out if starting else out.swapaxes(0, 1)


def transition(params: Params, pair: jax.Array) -> jax.Array:
    """Algorithm 15: two products with a ReLU between."""
    x = layer_norm(params["norm"], pair)
    return linear(params["out"], jax.nn.relu(linear(params["wide"], x)))


def block(params: Params, pair: jax.Array) -> jax.Array:
    """All five steps, each added to its input."""
    pair += triangle_product(params["outgoing"], pair, outgoing=True)
    pair += triangle_product(params["incoming"], pair, outgoing=False)
    pair += triangle_attention(params["starting"], pair, starting=True)
    pair += triangle_attention(params["ending"], pair, starting=False)
    return pair + transition(params["transition"], pair)


def apply(params: Params, logits: jax.Array, *, block: Block = block) -> jax.Array:
    """The logits of binned distances, of a sequence of logits of amino acids.

    Args:
        params: The parameters; those of the blocks are stacked.
        logits: Of each residue's kind: (residues, kinds).
        block: One block, such as one under `jax.checkpoint`.
    """
    sequence = jax.nn.softmax(logits, axis=-1)
    left, right = (linear(params[side], sequence) for side in ("left", "right"))
    pair = left[:, None] + right[None]
    pair, _ = jax.lax.scan(lambda pair, params: (block(params, pair), None), pair, params["blocks"])
    return linear(params["bins"], layer_norm(params["norm"], pair))


def init(
    key: jax.Array, blocks: int, channels: int = 128, bins: int = 64, dtype: Any = jnp.bfloat16
) -> Params:
    """The parameters of a number of blocks."""
    keys = iter(jax.random.split(key, 64))

    def of_linear(inputs: int, outputs: int, stack: tuple[int, ...] = ()) -> Params:
        w = jax.random.normal(next(keys), (*stack, inputs, outputs), dtype) * inputs**-0.5
        return {"w": w, "b": jnp.zeros((*stack, outputs), dtype)}

    def of_norm(stack: tuple[int, ...] = ()) -> Params:
        shape = (*stack, channels)
        return {"scale": jnp.ones(shape, dtype), "offset": jnp.zeros(shape, dtype)}

    norm, dense = (functools.partial(f, stack=(blocks,)) for f in (of_norm, of_linear))
    square = functools.partial(dense, channels, channels)
    sides = ("left", "left_gate", "right", "right_gate", "gate", "out")

    def product() -> Params:
        return {"norm": norm(), "center_norm": norm()} | {name: square() for name in sides}

    def attention() -> Params:
        parts = {name: square() for name in ("q", "k", "v", "gate", "out")}
        return {"norm": norm(), "bias": dense(channels, HEADS)} | parts

    wider = WIDER * channels
    return {
        "left": of_linear(KINDS, channels),
        "right": of_linear(KINDS, channels),
        "norm": of_norm(),
        "bins": of_linear(channels, bins),
        "blocks": {
            "outgoing": product(),
            "incoming": product(),
            "starting": attention(),
            "ending": attention(),
            "transition": {
                "norm": norm(),
                "wide": dense(channels, wider),
                "out": dense(wider, channels),
            },
        },
    }


def loss(around: Around, logits: jax.Array, params: Params, bins: jax.Array) -> jax.Array:
    """The cross-entropy of the bins that all distances should be in."""
    found = apply(params, logits, block=around(block)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(found, bins).mean()


def shapes(residues: int, blocks: int = 48, channels: int = 128) -> tuple[Any, ...]:
    """The shapes of the sequence's logits, which are trained, the parameters, and the bins."""
    params = jax.eval_shape(lambda: init(jax.random.key(0), blocks, channels))
    return (
        jax.ShapeDtypeStruct((residues, KINDS), jnp.bfloat16),
        params,
        jax.ShapeDtypeStruct((residues, residues), jnp.int32),
    )


SCENARIO = Scenario(loss, shapes, 512, optax.sgd(0.1))
