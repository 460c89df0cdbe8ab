"""A function is what its derivative rule says: JAX's functions with JAX's rules, or with others."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jaxcomp as jc
from jaxcomp.transform._program.program import Program
from jaxcomp.transform._program.without_codes import without_codes
from tests.helpers import assert_close, normal, slow

X, W = normal((16, 4, 8)), normal((16, 4, 8), seed=1)


def of_rule(primal, define):
    function = jax.custom_jvp(primal)
    define(function)
    return function


def scaled(primal, slope):
    return of_rule(primal, lambda f: f.defjvp(lambda p, t: (primal(*p), slope * t[0])))


def scaled_for_each(primal, slope):
    return of_rule(primal, lambda f: f.defjvps(lambda t, y, x: slope * t * (1 + x)))


def _slope_of(slope, primals, tangents):
    return jnp.sign(primals[0]), slope * tangents[0]


def by_vjp(slope):
    function = jax.custom_vjp(jax.nn.relu)
    function.defvjp(lambda x: (jax.nn.relu(x), x), lambda x, g: (slope * g * (1 + x),))
    return function


def by_static_argument(slope):
    function = jax.custom_jvp(lambda slope, x: jnp.sign(x), nondiff_argnums=(0,))
    function.defjvp(lambda slope, p, t: (jnp.sign(p[0]), slope * t[0]))
    return functools.partial(function, slope)


_NAMES = "relu relu6 gelu silu hard_swish elu leaky_relu softplus log_sigmoid"
OF_JAX = {
    **{name: getattr(jax.nn, name) for name in _NAMES.split()},
    "gelu, exact": functools.partial(jax.nn.gelu, approximate=False),
    "logsumexp": lambda x: jax.nn.logsumexp(x, -1, keepdims=True) + x,
    "sinc": jnp.sinc,
    "where": lambda x: jnp.where(x > 0.1, x, 0.25 * x),
}
OF_USERS = {
    **{f"sign, {slope}": scaled(jnp.sign, slope) for slope in (1.0, -2.0)},
    **{
        f"partial, {slope}": of_rule(
            jnp.sign, lambda f, slope=slope: f.defjvp(functools.partial(_slope_of, slope))
        )
        for slope in (1.0, -2.0)
    },
    **{
        f"{name}, {slope}": scaled_for_each(getattr(jax.nn, name), slope)
        for name in ("relu", "relu6", "silu", "hard_swish")
        for slope in ((-1.0, 3.0) if name == "relu" else (-1.0,))
    },
    "gelu": scaled_for_each(lambda x: jax.nn.gelu(x), -1.0),
    "rule of another function": of_rule(
        jax.nn.relu, lambda f: f.defjvp(functools.partial(jax.jvp, jnp.sin))
    ),
    "jitted rule": of_rule(
        jax.nn.relu, lambda f: f.defjvp(jax.jit(lambda p, t: (jax.nn.relu(*p), -3 * t[0])))
    ),
    "zeros of symbols": of_rule(
        jax.nn.relu,
        lambda f: f.defjvp(lambda p, t: (jax.nn.relu(*p), -3 * t[0]), symbolic_zeros=True),
    ),
    **{f"static, {slope}": by_static_argument(slope) for slope in (1.0, -2.0)},
    **{f"vjp, {slope}": by_vjp(slope) for slope in (1.0, -2.0)},
    "maximum": scaled(lambda x: jnp.maximum(x, 0), -1.0),
}
FUNCTIONS = OF_JAX | OF_USERS


def after_batch_norm(function):
    def run(x):
        mean, variance = (s(x, (0, 1), keepdims=True) for s in (jnp.mean, jnp.var))
        return function((x - mean) * jax.lax.rsqrt(variance + 1e-3) * 1.5 + 0.25)

    return run


def in_scan(function):
    return lambda x: jax.lax.scan(lambda c, _: (function(1.1 * c), None), x, length=2)[0]


AROUND = {
    "alone": lambda function: lambda x: function(1.5 * x),
    "after a batch norm": after_batch_norm,
    "in a scan": in_scan,
    "in jit and vmap": lambda function: lambda x: jax.vmap(jax.jit(function))(1.5 * x),
}


POLICIES = {
    "Exact": jc.Exact(),
    "automatic": "automatic",
    "nothing_saveable": jax.checkpoint_policies.nothing_saveable,
    "fused": "fused:bits=4",
}
# Each kind of rule, and other rules of equal values.
FOLLOWING = "relu", "relu, -1.0", "relu, 3.0", "relu6, -1.0", "silu", "sign, -2.0", "vjp, 1.0"
SOME = {name: FUNCTIONS[name] for name in FOLLOWING}
CASES = [
    ("after a batch norm", "Exact", FUNCTIONS),
    ("after a batch norm", "automatic", SOME),
    ("after a batch norm", "fused", SOME),
    ("in a scan", "Exact", SOME),
    ("in jit and vmap", "automatic", SOME),
    slow("after a batch norm", "automatic", FUNCTIONS),
    slow("after a batch norm", "nothing_saveable", FUNCTIONS),
    slow("alone", "Exact", FUNCTIONS),
    slow("alone", "automatic", FUNCTIONS),
    slow("in a scan", "Exact", FUNCTIONS),
    slow("in jit and vmap", "automatic", FUNCTIONS),
]


@pytest.mark.parametrize(("around", "policy", "functions"), CASES)
def test_gradients_follow_the_rule(around, policy, functions):
    """Programs of equal values and other rules, in one loss."""

    def gradients(transform):
        def loss(xs):
            made = {name: transform(AROUND[around](f))(xs[name]) for name, f in functions.items()}
            return sum(jnp.sum(y * W) for y in made.values())

        return jax.jit(jax.grad(loss))(dict.fromkeys(functions, X))

    found = gradients(lambda f: jc.checkpoint(f, POLICIES[policy]))
    expected = gradients(lambda f: f)
    rtol = 1e-5 if policy in ("Exact", "nothing_saveable") else 0.35  # noise of codes
    for name in functions:
        error, norm = (jnp.linalg.norm(a) for a in (found[name] - expected[name], expected[name]))
        assert error <= rtol * norm, name


def test_equal_programs_are_decided_once_if_the_rules_are_of_jax():
    asked = []

    def policy(primitive, *_, **__):
        asked.append(primitive)
        return False

    def decisions(functions):
        counts = []
        for function in functions:
            asked.clear()
            jax.grad(lambda x, f=function: jnp.sum(jc.checkpoint(f, policy)(x)))(X)
            counts.append(len(asked))
        return counts

    first, *others = decisions([lambda x, f=f: f(jnp.sin(x)) for f in [jax.nn.relu] * 3])
    assert first and not any(others)
    assert all(decisions([lambda x, s=s: scaled(jnp.sign, s)(jnp.sin(x)) for s in (1.0, 1.0)]))


def test_a_users_rule_of_a_function_of_this_package_is_not_taken_for_a_code():
    function = jax.custom_vjp(jc.ops.relu)
    function.defvjp(lambda x: (jc.ops.relu(x), None), lambda _, g: (3 * g,))
    exact = without_codes(Program.trace(function, X))
    assert_close(jax.grad(lambda x: jnp.sum(exact(x)[0]))(X), jnp.full_like(X, 3))
