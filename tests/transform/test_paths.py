"""A code that comes twice on a path: two codes, or a mean of independent noise between them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp as jc
from tests.helpers import normal

CODEC = jc.Quantize(bits=2)
X, W = normal((16, 32)), 0.3 * normal((32, 96), seed=1)
MAP = jnp.square(normal((16, 8, 8, 96), seed=2))


def sine(x, w):
    return jnp.sin(x @ w)


def weighted_mean(x, w):
    """Of 9,216 elements, of which all but 96 have weight 0."""
    h = sine(x, w)
    outer = h[:, :, None] * h[:, None, :]
    mean = jnp.mean(outer * (96 * jnp.eye(96)[None]), (1, 2))
    return jnp.sum(h * mean[:, None])


def gate(x, w):
    """Its code does not vary over the map whose mean is taken."""
    g = jax.nn.sigmoid(x @ w)[:, None, None]
    return jnp.sum(g * jnp.mean(g * g * MAP, (1, 2), keepdims=True))


def gated_norm(x, w):
    g = jax.nn.sigmoid(x @ w)[:, None, None]
    y = g * MAP
    return jnp.sum(y * jax.lax.rsqrt(jnp.mean(y * y, (1, 2), keepdims=True)) * MAP)


def layer_norm(x, w):
    return jnp.sum(jax.nn.standardize(sine(x, w)) ** 3)


@pytest.mark.parametrize("fn", [weighted_mean, gate, gated_norm])
def test_a_mean_without_independent_noise_does_not_count(fn):
    notes = [value.note for value in jc.checkpoint(fn, CODEC).plan(X, W).values]
    assert not any("across a mean" in note for note in notes)
    assert any("2 independent codes" in note for note in notes)


def test_a_norms_mean_counts():
    notes = [value.note for value in jc.checkpoint(layer_norm, CODEC).plan(X, W).values]
    assert "used twice, across a mean of 96: bias of about its rounding variance / 96" in notes


def test_a_gate_before_a_mean_is_unbiased():
    exact = np.ravel(jax.grad(gate, 1)(X, W))

    @jax.jit
    def gradient(seed):
        return jax.grad(jc.checkpoint(gate, CODEC, seed=seed), 1)(X, W)

    draws = np.stack([np.ravel(gradient(seed)) for seed in range(256)])
    along = (draws - exact) @ exact / (exact @ exact)
    assert abs(along.mean()) < 5 * along.std(ddof=1) / len(along) ** 0.5
    assert along.std() > 0
