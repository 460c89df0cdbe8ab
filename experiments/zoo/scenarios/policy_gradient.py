"""Reinforcement learning of a small Gemma by adapters: log-probabilities of sampled tokens.

The vocabulary of 262,144 makes the logits the largest array. The loss is that of GRPO
(arXiv:2402.03300) for one update of a batch.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from experiments.zoo.scenarios import gemma
from experiments.zoo.scenarios.scenario import Around, Scenario
from jaxcomp.ops import linear_log_probs

GEMMA_1B = gemma.Sizes(depth=26, width=1152, heads=4, head=256, hidden=6912)


def logits_loss(
    around: Around, adapters: Any, params: Any, tokens: jax.Array, advantages: jax.Array
) -> jax.Array:
    """The loss by all logits."""
    hidden, embedding = _hidden(around, adapters, params, tokens)
    logits = (hidden @ embedding.T).astype(jnp.float32)
    log_probs = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)[..., 0]
    return -(advantages[:, None] * chosen).mean()


def chunked_loss(
    around: Around, adapters: Any, params: Any, tokens: jax.Array, advantages: jax.Array
) -> jax.Array:
    """The same loss without all logits."""
    hidden, embedding = _hidden(around, adapters, params, tokens)
    chosen = linear_log_probs(hidden, embedding.T, tokens[:, 1:]).log_probs
    return -(advantages[:, None] * chosen).mean()


def _hidden(
    around: Around, adapters: Any, params: Any, tokens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    embedding = params["embedding"]
    x = embedding[tokens[:, :-1]] * embedding.shape[-1] ** 0.5
    return gemma.apply(around, params, adapters, x.astype(embedding.dtype)), embedding


def shapes(
    batch: int, length: int = 1025, vocabulary: int = 262_144, sizes: gemma.Sizes = GEMMA_1B
) -> tuple[Any, ...]:
    """The shapes of the adapters, the frozen parameters, the tokens and the advantages."""
    params, adapters = gemma.shapes(sizes)
    params["embedding"] = jax.ShapeDtypeStruct((vocabulary, sizes.width), jnp.bfloat16)
    return (
        adapters,
        params,
        jax.ShapeDtypeStruct((batch, length), jnp.int32),
        jax.ShapeDtypeStruct((batch,), jnp.float32),
    )


ALL_LOGITS = Scenario(logits_loss, shapes, 4, optax.adamw(1e-4))
CHUNKED = Scenario(chunked_loss, shapes, 4, optax.adamw(1e-4))
