"""Calls, iterations and nested calls of `checkpoint` have noise of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp as jc
from tests.helpers import normal, z_limit

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


@pytest.mark.parametrize("calls", [_loop, _scan, _jitted, _nested])
def test_products_of_equal_values_in_several_calls_are_unbiased(calls):
    exact = jax.grad(lambda x: calls(_gate, x, None, jc.Exact()).sum())(X)

    @jax.jit
    @jax.vmap
    def draw(seed):
        gate = jc.checkpoint(_gate, CODEC, seed=seed)
        return jax.grad(lambda x: calls(gate, x, seed, CODEC).sum())(X)

    slopes = np.einsum("dij,ij->d", draw(jnp.arange(DRAWS)), exact / (exact**2).sum())
    assert slopes.std() > 1e-3  # there is noise
    assert abs(slopes.mean() - 1) < z_limit(4) * slopes.std() / DRAWS**0.5


def test_a_seed_redraws_the_noise_and_nothing_else_does():
    def gradient(seed):
        return jax.grad(lambda x: jc.checkpoint(_gate, CODEC, seed=seed)(x, Z, W).sum())(X)

    np.testing.assert_array_equal(gradient(3), gradient(3))
    assert np.any(gradient(3) != gradient(4))
