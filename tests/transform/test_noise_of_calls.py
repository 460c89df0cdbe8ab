"""Calls, iterations and nested calls of `checkpoint` have noise of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp as jc
from tests.helpers import normal, slow, z_limit

X, Z, W = normal((32, 64)), normal((32, 64), seed=1), normal((64, 64), seed=2) / 8
DRAWS = 256
CODEC = jc.Quantize(bits=2)


def _gate(x, z, w):
    return x * jax.nn.sigmoid(z @ w)


def _loop(gate, x, seed, codec):
    for _ in range(4):
        x = gate(x, Z, W)
    return x


def _scan(gate, x, seed, codec):
    return jax.lax.scan(lambda carry, _: (gate(carry, Z, W), None), x, None, length=4)[0]


def _jitted(gate, x, seed, codec):
    return _loop(jax.jit(gate), x, seed, codec)


def _nested(gate, x, seed, codec):
    return jc.checkpoint(lambda x: _gate(gate(x, Z, W), Z, W), codec, seed=seed)(x)


# Inputs that calls change in few places: zeros stay zeros.
INPUTS = {
    "random": X,
    "padded in the middle": X.at[3:29].set(0),
    "first rows padded": X.at[:24].set(0),
    "last rows padded": X.at[8:].set(0),
    "both ends padded": X.at[:14].set(0).at[18:].set(0),
    "zero columns": X.at[:, :60].set(0),
    "one column": jnp.zeros_like(X).at[:, 17].set(1),
    "equal rows": jnp.broadcast_to(X[:1], X.shape),
    "constant": jnp.ones_like(X),
    "one-hot": jax.nn.one_hot(jnp.arange(32) * 7 % 64, 64),
}
SELDOM = ("first rows padded", "last rows padded", "both ends padded", "zero columns")
SELDOM += ("equal rows", "constant", "one-hot")


def _is_unbiased(gradients, exact):
    slopes = np.einsum("dij,ij->d", gradients, exact / (exact**2).sum())
    assert slopes.std() > 1e-3  # there is noise
    assert abs(slopes.mean() - 1) < z_limit(64) * slopes.std() / DRAWS**0.5


@pytest.mark.parametrize(
    ("calls", "given"),
    [
        *((calls, "random") for calls in (_loop, _scan, _nested)),
        *((_scan, given) for given in ("padded in the middle", "one column")),
        slow(_jitted, "random"),
        *(slow(_scan, given) for given in SELDOM),
    ],
)
def test_products_of_equal_values_in_several_calls_are_unbiased(calls, given):
    x = INPUTS[given]
    exact = jax.grad(lambda x: calls(_gate, x, None, jc.Exact()).sum())(x)

    @jax.jit
    @jax.vmap
    def draw(seed):
        gate = jc.checkpoint(_gate, CODEC, seed=seed)
        return jax.grad(lambda x: calls(gate, x, seed, CODEC).sum())(x)

    _is_unbiased(draw(jnp.arange(DRAWS)), exact)


def test_a_seed_redraws_the_noise_and_nothing_else_does():
    def gradient(seed):
        return jax.grad(lambda x: jc.checkpoint(_gate, CODEC, seed=seed)(x, Z, W).sum())(X)

    np.testing.assert_array_equal(gradient(3), gradient(3))
    assert np.any(gradient(3) != gradient(4))
