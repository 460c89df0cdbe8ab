"""Inputs and losses that several families share."""

import jax
import jax.numpy as jnp
import optax

from tests.helpers import normal

LABELS = jnp.arange(8) % 5
TOKENS = jax.random.randint(jax.random.key(0), (2, 32), 1, 64)


def images(size=32, batch=8):
    return normal((batch, size, size, 3))


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def next_token(logits, tokens=TOKENS):
    """Cross entropy of each token given those before it."""
    return cross_entropy(logits[:, :-1], tokens[:, 1:])
