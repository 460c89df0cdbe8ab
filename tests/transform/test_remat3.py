"""JAX's option `jax_remat3`: names, and `jax.checkpoint` within a function, are seen as before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxcomp as jc

X, W = jnp.linspace(-1, 1, 64 * 32).reshape(64, 32), jnp.linspace(-1, 1, 32 * 32).reshape(32, 32)


def _network(x, w):
    block = jax.checkpoint(lambda x, w: jnp.tanh(jnp.sin(x @ w) @ w))
    return jnp.exp(checkpoint_name(block(x, w), "hidden") @ w).sum()


@pytest.fixture
def remat3():
    before = jax.config.values["jax_remat3"]
    jax.config.update("jax_remat3", True)
    yield
    assert jax.config.values["jax_remat3"]
    jax.config.update("jax_remat3", before)


def test_a_plan_and_a_gradient_are_those_without_the_option(remat3):
    policy = jc.recipes.save_names({"hidden": jc.Quantize(bits=8)})
    coded = jc.checkpoint(_network, policy=policy)
    with_option = jc.plan(coded, X, W), jax.jit(jax.grad(coded, 1))(X, W)
    jax.config.update("jax_remat3", False)
    coded = jc.checkpoint(_network, policy=policy)
    without = jc.plan(coded, X, W), jax.jit(jax.grad(coded, 1))(X, W)
    jax.config.update("jax_remat3", True)
    assert [v.shape for v in with_option[0].values] == [v.shape for v in without[0].values]
    assert with_option[0].saved_bytes == without[0].saved_bytes
    np.testing.assert_array_equal(with_option[1], without[1])


def test_the_option_is_restored_after_an_error(remat3):
    with pytest.raises(ZeroDivisionError):
        jc.checkpoint(lambda x: x / (1 // 0))(X)
