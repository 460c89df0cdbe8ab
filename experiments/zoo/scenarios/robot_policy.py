"""A vision-language-action policy, fine-tuned by adapters: images and words to robot actions.

Its form is that of openpi (arXiv:2410.24164): a frozen SigLIP encoder, a frozen Gemma 2B with
adapters, and small trained layers for states and actions. Actions are learned by flow matching.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from experiments.zoo.scenarios import gemma
from experiments.zoo.scenarios.layers import layer_norm
from experiments.zoo.scenarios.scenario import Around, Scenario

GEMMA_2B = gemma.Sizes(depth=18, width=2048, heads=8, head=256, hidden=16_384)
PATCH = 14


def encoder_layer(params: Any, x: jax.Array, heads: int) -> jax.Array:
    """A layer of a vision transformer."""
    y = layer_norm(params["norm1"], x, 1e-6)
    q, k, v = (
        (y @ params[name]).reshape(*x.shape[:2], heads, -1) for name in ("query", "key", "value")
    )
    x += jax.nn.dot_product_attention(q, k, v).reshape(x.shape) @ params["out"]
    y = layer_norm(params["norm2"], x, 1e-6)
    return x + jax.nn.gelu(y @ params["up"]) @ params["down"]


def encode(params: Any, images: jax.Array, heads: int = 16) -> jax.Array:
    """The tokens of images, one for each patch."""
    count, height, width, channels = images.shape
    x = images.reshape(count, height // PATCH, PATCH, width // PATCH, PATCH, channels)
    x = x.transpose(0, 1, 3, 2, 4, 5).reshape(count, -1, PATCH * PATCH * channels)
    x = x @ params["patches"] + params["positions"]
    x, _ = jax.lax.scan(lambda x, w: (encoder_layer(w, x, heads), None), x, params["layers"])
    return x


def loss(
    around: Around,
    trained: Any,
    frozen: Any,
    images: jax.Array,
    words: jax.Array,
    actions: jax.Array,
    noise: jax.Array,
    times: jax.Array,
) -> jax.Array:
    """The mean squared error of the predicted velocity of noisy actions."""
    decoder = frozen["decoder"]
    prefix = [encode(frozen["encoder"], images) @ frozen["project"], decoder["embedding"][words]]
    times = times[:, None, None].astype(actions.dtype)
    noisy = times * noise + (1 - times) * actions
    small = jax.tree.map(lambda w: w.astype(actions.dtype), trained["actions"])
    suffix = noisy @ small["in"] + times * small["time"]
    x = jnp.concatenate([*prefix, suffix], axis=1)
    x = gemma.apply(around, decoder, trained["adapters"], x, causal=False)
    velocity = x[:, -actions.shape[1] :] @ small["out"]
    return jnp.square((velocity - (noise - actions)).astype(jnp.float32)).mean()


def shapes(
    batch: int,
    *,
    decoder: gemma.Sizes = GEMMA_2B,
    vocabulary: int = 257_152,
    depth: int = 27,
    width: int = 1152,
    hidden: int = 4304,
    pixels: int = 224,
    words: int = 20,
    steps: int = 16,
    degrees: int = 32,
) -> tuple[Any, ...]:
    """The shapes of what is trained, what is frozen, and a batch: about 290 tokens an example."""

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    kernels = {name: array(depth, width, width) for name in ("query", "key", "value", "out")}
    norms = {
        name: {"scale": array(depth, width), "offset": array(depth, width)}
        for name in ("norm1", "norm2")
    }
    networks = {"up": array(depth, width, hidden), "down": array(depth, hidden, width)}
    encoder = {
        "patches": array(PATCH * PATCH * 3, width),
        "positions": array((pixels // PATCH) ** 2, width),
        "layers": kernels | norms | networks,
    }
    params, adapters = gemma.shapes(decoder)
    params["embedding"] = array(vocabulary, decoder.width)
    frozen = {"encoder": encoder, "decoder": params, "project": array(width, decoder.width)}
    small = {
        "in": array(degrees, decoder.width, dtype=jnp.float32),
        "time": array(decoder.width, dtype=jnp.float32),
        "out": array(decoder.width, degrees, dtype=jnp.float32),
    }
    of_actions = array(batch, steps, degrees)
    return (
        {"adapters": adapters, "actions": small},
        frozen,
        array(batch, pixels, pixels, 3),
        array(batch, words, dtype=jnp.int32),
        of_actions,
        of_actions,
        array(batch, dtype=jnp.float32),
    )


SCENARIO = Scenario(loss, shapes, 32, optax.adamw(1e-4))
