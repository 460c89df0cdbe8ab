"""Where nothing can be encoded, every mode gives the derivatives of `jax.checkpoint`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jaxcomp as jc
from tests.helpers import assert_close, kept, normal, slow

POLICIES = (
    jc.Exact(),
    jax.checkpoint_policies.everything_saveable,
    jax.checkpoint_policies.nothing_saveable,
    jax.checkpoint_policies.dots_saveable,
)
X, T, U = (0.5 * normal((4, 6), seed=i) for i in range(3))
W = 0.5 * normal((3, 6, 6), seed=3)
INDEX = jnp.array([2, 0, 1, 1])


@jax.custom_jvp
def _straight_through(x):
    return jnp.round(4 * x) / 4


@_straight_through.defjvp
def _(primals, tangents):
    return _straight_through(*primals), tangents[0] * (1 + primals[0])


def _block(x, index):
    h = jnp.maximum(x @ W[0], 0.0)[index] + jnp.sin(x)
    return jax.nn.softplus(h @ W[1]) * _straight_through(x)


def _scans(x, index):
    def step(carry, w):
        state, still = carry
        state = state + jnp.tanh(state @ w + still)
        return (state, still), (jnp.sin(state[index]), index.sum())

    (state, _), (each, _) = lax.scan(step, (jnp.zeros_like(x), x), W)
    return state * each.sum(0) * lax.scan(lambda c, w: (jnp.cos(c @ w), None), x, W[::-1])[0]


def _branches(x, index):
    return lax.cond(index[0] > 0, jnp.sin, jnp.exp, x) * lax.fori_loop(0, 2, lambda i, c: c * x, x)


def _ties(x, index):
    return jnp.sinc(x * 0) * jnp.maximum(x, x) * jnp.clip(x, 0.0, 0.5)


FUNCTIONS = {"block": _block, "scans": _scans, "branches": _branches, "ties": _ties}


def _derivatives(fn, is_all):
    """Derivatives of first, second and third order in many orders of the modes, or in some."""

    def run(x):
        return fn(x, INDEX)

    def loss(x):
        return jnp.sum(run(x) ** 2)

    def along(f, t):
        return lambda x: jax.jvp(f, (x,), (t,))[1]

    slope = along(loss, T)
    out, push = jax.linearize(run, X)
    some = {
        "linearize": (out, push(T), push(U)),
        "forward over reverse": along(jax.grad(loss), T)(X),
        "third": jax.grad(along(slope, U))(X),
        "vmap of jvp": jax.vmap(lambda t: along(run, t)(X))(jnp.stack([T, U])),
    }
    if not is_all:
        return some
    return some | {
        "jvp": along(run, T)(X),
        "jacfwd": jax.jacfwd(run)(X),
        "jacfwd of jacfwd": jax.jacfwd(jax.jacfwd(lambda x: run(x).sum()))(X),
        "reverse over forward": jax.grad(slope)(X),
        "forward over forward": along(slope, U)(X),
        "reverse over the tangent": jax.grad(lambda t: jnp.sum(along(run, t)(X) ** 2))(T),
        "hessian": jax.hessian(loss)(X),
        "jvp of vmap": along(jax.vmap(lambda x: run(x[None] + X)), T)(X),
        "gradient of vmap": jax.grad(lambda x: jnp.sum(jax.vmap(loss)(jnp.stack([x, T]))))(X),
        "jvp of jit": along(jax.jit(run), T)(X),
        "in a checkpoint": jax.grad(jax.checkpoint(slope))(X),
    }


@functools.cache
def _expected(name, is_all):
    return jax.jit(lambda: _derivatives(jax.checkpoint(FUNCTIONS[name]), is_all))()


@pytest.mark.parametrize(
    ("policy", "name", "is_all"),
    [
        (POLICIES[0], "branches", True),
        *((POLICIES[0], name, False) for name in FUNCTIONS if name != "branches"),
        *(slow(POLICIES[0], name, True) for name in FUNCTIONS if name != "branches"),
        slow(jax.checkpoint_policies.dots_saveable, "block", True),
        *(slow(policy, "scans", True) for policy in POLICIES[1:]),
    ],
)
def test_all_modes_are_those_of_jax(policy, name, is_all):
    got = jax.jit(lambda: _derivatives(jc.checkpoint(FUNCTIONS[name], policy), is_all))()
    expected = _expected(name, is_all)
    for mode in expected:
        assert_close(got[mode], expected[mode], 1e-5)


def test_without_jit():
    fn = jc.checkpoint(_scans, jc.Exact())
    (got, moved), (expected, moves) = (
        jax.jvp(lambda x, f=f: f(x, INDEX), (X,), (T,)) for f in (fn, _scans)
    )
    assert_close(got, expected, 1e-6)
    assert_close(moved, moves, 1e-5)
    _, (float0,) = jax.jvp(jc.checkpoint(lambda i: [i + 1], jc.Exact()), (INDEX,), (_zero(INDEX),))
    assert float0.dtype == jax.dtypes.float0


def _zero(integers):
    return np.zeros(integers.shape, jax.dtypes.float0)


def test_nested_functions_and_closures():
    def nested(wrap, x):
        inner = wrap(lambda h: jnp.sin(h @ W[0]) * jnp.cos(x))
        return wrap(lambda h: jnp.exp(inner(h) @ W[1]))(x)

    def derivatives(wrap):
        def slope(x):
            return jax.jvp(lambda x: jnp.sum(nested(wrap, x)), (x,), (T,))[1]

        return slope(X), jax.grad(slope)(X)

    got, expected = (
        jax.jit(functools.partial(derivatives, wrap))()
        for wrap in (
            lambda f: jc.checkpoint(f, jax.checkpoint_policies.dots_saveable),
            jax.checkpoint,
        )
    )
    assert_close(got, expected, 1e-5)


def test_axis_names():
    def centred(x):
        return jnp.sin(x - lax.pmean(x, "rows")) @ W[0]

    def derivatives(fn):
        mapped = jax.vmap(fn, axis_name="rows")
        tangent = jax.jvp(mapped, (X,), (T,))[1]
        return tangent, jax.grad(lambda x: jnp.sum(mapped(x) ** 2))(X)

    got, expected = (
        jax.jit(functools.partial(derivatives, fn))()
        for fn in (jc.checkpoint(centred, jc.Exact()), centred)
    )
    assert_close(got, expected, 1e-5)


@pytest.mark.parametrize("policy", kept(POLICIES, POLICIES[2:3]))
def test_compressed_models(policy):
    def model():
        rngs = nnx.Rngs(0)
        norm, dense = nnx.LayerNorm(6, rngs=rngs), nnx.Linear(6, 6, rngs=rngs)
        return nnx.Sequential(norm, dense, nnx.gelu, nnx.BatchNorm(6, rngs=rngs))

    def derivatives(model):
        graph, params, rest = nnx.split(model, nnx.Param, ...)

        def loss(params, x):
            return jnp.sum(nnx.merge(graph, params, rest, copy=True)(x) ** 3)

        def slope(params):
            return jax.jvp(lambda x: loss(params, x), (X,), (T,))[1]

        product = jax.jvp(jax.grad(loss), (params, X), (params, T))[1]
        return jax.tree.leaves((slope(params), jax.grad(slope)(params), product))

    derivatives = nnx.jit(derivatives)
    for got, expected in zip(
        derivatives(jc.compress(model(), policy)), derivatives(model()), strict=True
    ):
        assert_close(got, expected, 1e-4)


def test_gradients_of_gradients_save_no_more():
    """What waits for the backward pass of a slope is what the policy saves, and tangents."""
    w = normal((64, 64))

    def deep(x):
        for _ in range(4):
            x = jnp.tanh(jnp.sin(x @ w) @ w)
        return x

    def waiting(fn):
        x = normal((512, 64))
        pull = jax.eval_shape(lambda x: jax.vjp(lambda x: jax.jvp(fn, (x,), (x,))[1], x)[1], x)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pull))

    least = jc.checkpoint(deep, jax.checkpoint_policies.nothing_saveable)
    assert waiting(least) < waiting(deep) / 4


def test_codecs_have_no_forward_mode():
    policy = jc.Policy((jc.Rule(jc.Quantize(bits=4)),))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(jc.checkpoint(lambda x: jnp.sin(x @ W[0]), policy), (X,), (T,))


def test_while_loops_have_forward_mode():
    def doubled(x):
        return lax.while_loop(lambda x: x.sum() < 100, lambda x: 2 * x, x)

    exact = jc.checkpoint(doubled, jc.Exact())
    assert_close(jax.jvp(exact, (X**2,), (T,)), jax.jvp(doubled, (X**2,), (T,)))
    with pytest.raises(ValueError, match="Reverse-mode"):
        jax.grad(lambda x: exact(x).sum())(X)
