"""Linear rules of `jax.custom_vjp` functions: what they read is encoded like any coefficient."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

import jaxcomp as jc
from tests.helpers import assert_same_bits, distance, normal, only, slow

X, W = normal((32, 64, 64)), normal((3, 64, 64), seed=1) / 8
EIGHT = jc.Quantize(bits=8)


def with_rule(backward, saves=lambda x: (x,)):
    """Returns silu with a rule of its own."""
    function = jax.custom_vjp(jax.nn.silu)
    function.defvjp(lambda x: (jax.nn.silu(x), saves(x)), backward)
    return function


def _slope(x):
    s = jax.nn.sigmoid(x)
    return s * (1 + x * (1 - s))


def _by_kernel(saved, g):
    def kernel(x, g, out):
        out[...] = _slope(x[...]) * g[...]

    kind = jax.ShapeDtypeStruct(g.shape, g.dtype)
    return (pl.pallas_call(kernel, kind, interpret=True)(*saved, g),)


OPENED = {
    "slope": with_rule(lambda saved, g: (_slope(*saved) * g,)),
    "made in the forward pass": with_rule(lambda saved, g: (saved[0] * g,), lambda x: (_slope(x),)),
    "saved twice": with_rule(
        lambda saved, g: (0.5 * (_slope(saved[0]) + _slope(saved[1])) * g,), lambda x: (x, x)
    ),
    "integers": with_rule(
        lambda saved, g: (_slope(saved[0] / 8.0) * g,),
        lambda x: (jnp.round(8 * x).astype(jnp.int8),),
    ),
    "straight through": with_rule(lambda saved, g: (g,), lambda x: ()),
    "a branch of residuals": with_rule(
        lambda saved, g: (jnp.where(saved[0] > 0, _slope(saved[0]) * g, 0.1 * g),)
    ),
}
CLOSED = {
    "clips": with_rule(lambda saved, g: (_slope(*saved) * jnp.clip(g, -0.01, 0.01),)),
    "adds to the cotangent": with_rule(lambda saved, g: (_slope(*saved) * g + 1e-5 * saved[0],)),
    "does not read the cotangent": with_rule(lambda saved, g: (1e-5 * saved[0],)),
    "rounds": with_rule(lambda saved, g: (_slope(*saved) * jnp.round(1e6 * g) / 1e6,)),
    "casts": with_rule(lambda saved, g: (_slope(*saved) * (1e6 * g).astype(jnp.int32) / 1e6,)),
    "8 bits": with_rule(
        lambda saved, g: (_slope(*saved) * g.astype("float8_e5m2").astype(g.dtype),)
    ),
    "stops": with_rule(lambda saved, g: (_slope(*saved) * jax.lax.stop_gradient(g),)),
    "selects by the cotangent": with_rule(lambda saved, g: (jnp.where(g > 0, saved[0] * g, g),)),
    "selects a constant": with_rule(lambda saved, g: (jnp.where(saved[0] > 0, g, 1e-5),)),
    "kernel": with_rule(_by_kernel),
    "larger": with_rule(
        lambda saved, g: (
            (_slope(saved[0])[..., None] / jnp.full((1,) * g.ndim + (4,), 4) * g[..., None]).sum(
                -1
            ),
        )
    ),
}


def network(function, weights, x):
    for w in weights:
        x = x + function(x @ w)
    return jnp.square(x).mean()


def scanned(function, weights, x):
    return jnp.square(jax.lax.scan(lambda x, w: (x + function(x @ w), None), x, weights)[0]).mean()


def of_examples(function, weights, x):
    return jax.vmap(lambda x: network(function, weights, x))(x).mean()


def in_regions(function, weights, x):
    return network(jax.checkpoint(jax.jit(function)), weights, x)


@pytest.mark.parametrize(
    ("name", "fn"),
    [
        *((name, network) for name in (*OPENED, *CLOSED)),
        *(("slope", fn) for fn in (scanned, of_examples, in_regions)),
        *(slow(name, fn) for name in CLOSED for fn in (scanned, of_examples, in_regions)),
    ],
)
def test_gradients_are_those_of_the_rule(name, fn):
    fn = functools.partial(fn, (OPENED | CLOSED)[name])
    value, exact = jax.jit(jax.value_and_grad(fn, (0, 1)))(W, X)
    for policy, error in ((jc.Exact(), 1e-4), (EIGHT, 0.02)):
        ours, found = jax.jit(jax.value_and_grad(jc.checkpoint(fn, policy), (0, 1)))(W, X)
        assert_same_bits(ours, value)
        assert max(map(distance, found, exact)) < error


@pytest.mark.parametrize("name", [*OPENED, *CLOSED])
def test_residuals_of_linear_rules_have_codes(name):
    plan = jc.plan(jc.checkpoint(functools.partial(network, (OPENED | CLOSED)[name]), EIGHT), W, X)
    kept = [value for value in plan.values if value.role == "residual"]
    if name in CLOSED:
        assert {value.decision for value in kept} == {"exact"}
    else:
        assert not kept
        assert all(value.decision != "exact" or value.elements < 1024 for value in plan.values)


@pytest.mark.parametrize("name", [*OPENED, *CLOSED])
def test_plans_say_where_a_rule_is_not_linear_in_its_cotangent(name):
    function = (OPENED | CLOSED)[name]

    def fn(weights, x):
        return jnp.square(jnp.tanh(function(x @ weights[0]) @ weights[1])).mean()

    coded = jc.checkpoint(fn, EIGHT)
    notes = [note for note in jc.plan(coded, W, X).notes if "not linear in its cotangent" in note]
    nonlinear = {"clips", "rounds", "casts", "8 bits", "selects by the cotangent"}
    assert len(notes) == (name in nonlinear)
    assert all("biased at test_opened_rules.py:" in note for note in notes)


def test_a_rule_that_jax_does_not_transpose_stays_whole():
    sizes = jnp.array([10, 22], jnp.int32)
    ragged = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[],
    )

    @jax.custom_vjp
    def product(x, w):
        return jax.lax.ragged_dot(x, w, sizes)

    def backward(saved, g):
        x, w = saved
        dx = jax.lax.ragged_dot(g, w.mT, sizes)
        return dx, jax.lax.ragged_dot_general(x, g, sizes, ragged)

    product.defvjp(lambda x, w: (product(x, w), (x, w)), backward)

    def loss(x, w):
        return jnp.square(product(jnp.tanh(x), w)).mean()

    given = normal((32, 64)), normal((2, 64, 64), seed=1)
    exact = jax.grad(loss, (0, 1))(*given)
    found = jax.grad(jc.checkpoint(loss, EIGHT), (0, 1))(*given)
    assert max(map(distance, found, exact)) < 0.02


def test_a_rule_that_names_residuals_keeps_the_function_closed():
    policy = jc.policies.Policy((*only(EIGHT, op="custom_vjp").rules, *only(EIGHT).rules))
    plan = jc.plan(jc.checkpoint(functools.partial(network, OPENED["slope"]), policy), W, X)
    assert {v.decision for v in plan.values if v.role == "residual"} == {str(EIGHT)}


def test_integer_results_have_no_cotangent():
    function = jax.custom_vjp(lambda x: (jax.nn.silu(x), jnp.sign(x).astype(jnp.int8)))
    function.defvjp(
        lambda x: (function(x), x), lambda saved, cotangents: (_slope(saved) * cotangents[0],)
    )

    def fn(weights, x):
        for w in weights:
            y, sign = function(x @ w)
            x = x + y * sign
        return jnp.square(x).mean()

    coded = jc.checkpoint(fn, EIGHT)
    assert not [value for value in jc.plan(coded, W, X).values if value.role == "residual"]
    assert distance(jax.grad(coded)(W, X), jax.grad(fn)(W, X)) < 0.02


def test_operands_that_a_custom_vmap_function_returns_are_themselves():
    """So a parameter that its rule saves is the parameter."""
    product = jax.custom_vjp(jnp.dot)
    saving = jax.custom_batching.sequential_vmap(lambda x, w: (x @ w, x, w))
    product.defvjp(
        lambda x, w: ((saved := saving(x, w))[0], saved[1:]),
        lambda saved, g: (g @ saved[1].T, saved[0].reshape(-1, 64).T @ g.reshape(-1, 64)),
    )

    def fn(weights, x):
        return jnp.square(product(jnp.tanh(x), weights)).mean()

    plan = jc.plan(jc.checkpoint(fn, EIGHT), W[0], X)
    assert W[0].shape not in {value.shape for value in plan.values}
    found, exact = (jax.grad(f)(W[0], X) for f in (jc.checkpoint(fn, EIGHT), fn))
    assert distance(found, exact) < 0.02
