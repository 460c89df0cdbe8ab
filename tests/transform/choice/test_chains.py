"""Factors in float32 before steps in bfloat16 are not rounded for all elements alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxcomp as jc
from tests.helpers import assert_same_bits, kept, normal

LAYERS, SIZE = 4, 64
X, CT = normal((SIZE, SIZE), seed=1), normal((SIZE, SIZE), seed=2)
WEIGHTS = [np.linalg.qr(np.asarray(normal((SIZE, SIZE), seed=10 + i)))[0] for i in range(LAYERS)]
# 1.0039 lies between two numbers of bfloat16, as 1 / 0.9 does.
FACTORS = {
    "constant": lambda h, s, i: h * 1.0039,
    "scalar": lambda h, s, i: h * s,
    "two scalars": lambda h, s, i: h.astype(jnp.bfloat16) * 0.9 * s.astype(jnp.bfloat16),
    "dropout": lambda h, s, i: jnp.where(_kept(i), h / 0.9, 0.0),
    "features": lambda h, s, i: h * jnp.broadcast_to(s, (1, SIZE)),
}


def _kept(i):
    return jax.random.bernoulli(jax.random.key(i), 0.9, (SIZE, SIZE))


def _network(factor, dtype):
    def run(x, s):
        for i, w in enumerate(WEIGHTS):
            x = jax.nn.gelu(FACTORS[factor](x @ w, s, i).astype(dtype)).astype(jnp.float32)
        return x

    return run


def _gradient(f):
    return jax.grad(lambda x: (f(x, jnp.float32(1.0039)) * CT).sum())


@pytest.mark.parametrize("factor", kept(FACTORS, ("two scalars", "dropout")))
def test_nothing_encoded_is_as_jax_checkpoint(factor):
    network = _network(factor, jnp.bfloat16)
    expected = _gradient(jax.checkpoint(network))(X)
    for policy in (jc.Exact(), jax.checkpoint_policies.nothing_saveable, "automatic"):
        assert_same_bits(_gradient(jc.checkpoint(network, policy))(X), expected)


@pytest.mark.parametrize("factor", kept(FACTORS, ("constant", "two scalars", "features")))
def test_codes_have_no_more_bias_than_bfloat16(factor):
    network, seeds = _network(factor, jnp.bfloat16), jnp.arange(1, 65, dtype=jnp.uint32)

    def along(gradient):
        """The gradient along that in float32, relative to it, less 1."""
        return jnp.vdot(gradient, exact) / jnp.vdot(exact, exact) - 1

    exact = jax.jit(_gradient(_network(factor, jnp.float32)))(X)
    stock = along(jax.jit(_gradient(network))(X))
    by_seed = lax.map(
        lambda seed: along(_gradient(jc.checkpoint(network, jc.Quantize(4), seed=seed))(X)), seeds
    )
    error = by_seed.std() / len(seeds) ** 0.5
    assert abs(by_seed.mean()) <= abs(stock) + 4 * error
    assert error < 1e-3  # a factor that is rounded in each layer is an error of 0.016


def test_exact_saves_one_array_for_a_chain_of_derivatives():
    """As codes have one derivative, elementwise steps are computed again from one value."""

    def saved(f):
        pull = jax.eval_shape(lambda x: jax.vjp(lambda x: f(x, jnp.float32(1.0)), x)[1], X)
        arrays = [leaf for leaf in jax.tree.leaves(pull) if leaf.shape == X.shape]
        return len(arrays) - LAYERS  # without the weights

    network = _network("constant", jnp.float32)
    assert saved(jc.checkpoint(network, jc.Exact())) == LAYERS
    assert saved(jc.checkpoint(network, "exact")) == LAYERS
    assert saved(network) > 4 * LAYERS
