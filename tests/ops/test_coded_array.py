"""An array with its code is passed on, and says what else to do where it is taken for an array."""

import pickle

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxcomp import SignAware, ops
from tests.helpers import normal


def test_it_is_no_array():
    x = ops.encode_activation(
        jax.nn.relu(normal((2, 4, 4, 8))), jnp.ones((1, 1, 1, 8)), SignAware(bits=4)
    )
    conv = nnx.Conv(8, 8, (3, 3), rngs=nnx.Rngs(0))
    for use in (lambda x: x.mean((1, 2)), jnp.mean, lambda x: jnp.ones(8) + x, nnx.relu, conv):
        with pytest.raises((AttributeError, TypeError), match=r"expected jaxcomp.ops.value\(x\)"):
            use(x)
    assert pickle.loads(pickle.dumps(x)).codec == jax.jit(lambda x: x)(x).codec
