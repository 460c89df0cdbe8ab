"""`checkpoint` with JAX's own checks, and with rarely used parts of JAX in or around it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxcomp as jc
from tests.helpers import assert_close, assert_same_bits, normal

X, W = normal((16, 32)), 0.2 * normal((32, 32), seed=1)
STACK = jnp.stack([W, 0.5 * W, -W])


def _loops(x, stack):
    return lax.scan(lambda x, w: (jax.nn.gelu(jax.nn.relu(x) @ w), None), x, stack)[0].sum()


def test_no_tracer_leaks():
    with jax.checking_leaks():
        for transform in (jax.grad, lambda fn: jax.jit(jax.grad(fn))):
            got = transform(jc.checkpoint(_loops, jc.Exact()))(X, STACK)
            assert_close(got, jax.grad(_loops)(X, STACK))


def test_a_cotangent_may_be_a_python_scalar():
    _, pull = jax.vjp(jc.checkpoint(lambda x: jnp.sin(x).sum(), jc.Exact()), X)
    assert_same_bits(pull(2.0), (2 * jnp.cos(X),))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_jax_enable_checks(dtype):
    def mlp(x, w):
        return (jax.nn.gelu(x @ w) @ w).astype(jnp.float32).sum()

    x, w = (jnp.tile(a, (1, 2)).astype(dtype) for a in (X, W.repeat(2, axis=0)))
    gradient = jax.grad(jc.checkpoint(mlp, jc.Quantize(bits=4)))
    with jax.enable_checks(True):
        checked = gradient(x, w)
    assert_same_bits(checked, gradient(x, w))
