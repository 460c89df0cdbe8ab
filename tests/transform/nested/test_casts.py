"""Casts of parameters in a loop are made once, before it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxcomp as jc
from jaxcomp.memory._tracing import inner_jaxprs
from tests.helpers import AS_WRITTEN, assert_close, assert_same_bits, distance, normal, slow

X, W = normal((4, 16, 32)), 0.2 * normal((32, 32), seed=1)


def _loss(w, x):
    """The parameter is also read as it is, and an integer is cast."""

    def step(h, x):
        y = jnp.tanh(h @ w.astype(jnp.bfloat16) + x.astype(jnp.bfloat16))
        return y + jnp.int32(1).astype(jnp.bfloat16), (y * w.sum()).astype(jnp.float32)

    start = jnp.zeros(x.shape[1:], jnp.bfloat16)
    h, ys = lax.scan(step, start, x)
    return jnp.square(ys).mean() + h.astype(jnp.float32).sum()


def _casts_in_loops(jaxpr, inside=False):
    count = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "convert_element_type" and inside:
            operand, result = equation.invars[0].aval, equation.outvars[0].aval
            count += operand.shape == W.shape and result.dtype == jnp.bfloat16
        for inner in inner_jaxprs(equation):
            count += _casts_in_loops(inner, inside or equation.primitive.name == "scan")
    return count


@pytest.mark.parametrize("policy", [slow(jc.Exact()), jc.Quantize(bits=8)], ids=str)
def test_parameters_are_cast_once(policy):
    coded = jc.checkpoint(_loss, policy)
    gradient = jax.grad(coded, (0, 1))
    assert _casts_in_loops(jax.make_jaxpr(gradient)(W, X).jaxpr) == 0
    assert _casts_in_loops(jax.make_jaxpr(jax.jit(_loss))(W, X).jaxpr) == 1
    assert_same_bits(jax.jit(coded)(W, X), jax.jit(_loss)(W, X))
    got, exact = (
        jax.jit(f, compiler_options=AS_WRITTEN)(W, X) for f in (gradient, jax.grad(_loss, (0, 1)))
    )
    assert jax.tree.map(jnp.result_type, got) == jax.tree.map(jnp.result_type, exact)
    if isinstance(policy, jc.Exact):
        assert_close(got, exact)
        moved = (jax.jvp(f, (W, X), (jnp.ones_like(W), X))[1] for f in (coded, _loss))
        assert_close(*moved, rtol=1e-2)
    else:
        assert 0 < distance(got, exact) < 0.05


def test_a_frozen_parameter_is_cast_once():
    gradient = jax.grad(jc.checkpoint(_loss, jc.Quantize(bits=8)), 1)
    assert _casts_in_loops(jax.make_jaxpr(gradient)(W, X).jaxpr) == 0
    assert 0 < distance(gradient(W, X), jax.grad(_loss, 1)(W, X)) < 0.05


def test_second_derivatives_by_a_parameter_that_was_frozen():
    def slope(fn):
        return jax.jit(
            jax.grad(lambda w: jnp.square(jax.grad(fn, 1)(w, X)).sum()), compiler_options=AS_WRITTEN
        )

    got = slope(jc.checkpoint(_loss, jc.Exact()))(W)
    assert distance(got, slope(_loss)(W)) < 1e-2


def test_under_vmap():
    many = jnp.stack([W, 2 * W])
    coded, stock = (
        jax.jit(jax.vmap(jax.grad(f), (0, None)))(many, X)
        for f in (jc.checkpoint(_loss, jc.Exact()), _loss)
    )
    assert distance(coded, stock) < 1e-2
