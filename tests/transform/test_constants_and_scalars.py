"""Arguments may be Python scalars, and results constants of any type, as for `jax.checkpoint`."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxcomp as jc
from tests.helpers import assert_close, kept, normal, slow

X = normal((8, 4))
KEY = jax.random.key(0)
POLICIES = {
    "Exact": jc.Exact(),
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
    "Quantize": jc.Quantize(4),
}


def _constants(x):
    others = True, 3, 2.5, -0.0, jnp.int32(7), np.float32(3), np.arange(4) > 2, KEY, 1j
    return jnp.sum(x * x), others, x.shape[0], jnp.argmax(x), x > 0, jax.random.key(jnp.argmax(x))


def _in_a_scan(x):
    def step(carry, _):
        value, count, _ = carry
        return (jnp.sin(value), count, True), (True, 3, jnp.sum(value), 1.5)

    (last, *state), each = lax.scan(step, (x, 0, False), None, length=3)
    return jnp.sum(last), state, each


def _in_branches(x):
    of_both = lambda x: (jnp.sum(x * x), True, 3, 1.0), lambda x: (jnp.sum(x), False, 4, jnp.max(x))
    return lax.cond(jnp.sum(x) > 0, *of_both, x)


def _value_and_gradient(f):
    return jax.value_and_grad(lambda x: (f(x)[0], f(x)[1:]), has_aux=True)


WRAPPED = {
    "eager": _value_and_gradient,
    "jit": lambda f: jax.jit(_value_and_gradient(f)),
    "vmap": lambda f: lambda x: jax.vmap(_value_and_gradient(f))(x[None]),
}


@pytest.mark.parametrize(
    ("fn", "policy"),
    [
        (_constants, "Exact"),
        (_in_a_scan, "Quantize"),
        (_in_branches, "Exact"),
        slow(_constants, "Quantize"),
        slow(_in_a_scan, "dots_saveable"),
        slow(_in_branches, "Quantize"),
    ],
)
def test_results_may_be_constants(fn, policy):
    coded = jc.checkpoint(fn, POLICIES[policy])
    for name, wrapped in WRAPPED.items():
        made, expected = (wrapped(f)(X) for f in (coded, fn))
        assert jax.tree.structure(made) == jax.tree.structure(expected), name
        for a, e in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
            assert jax.typeof(a) == jax.typeof(e)
            assert jax.typeof(a).weak_type == jax.typeof(e).weak_type
            rtol = 0.1 if policy == "Quantize" else 1e-5
            np.testing.assert_allclose(_plain(a), _plain(e), rtol, 0)
    # None of its arguments is differentiated.
    assert_close(jax.grad(lambda t: t * coded(X)[0])(2.0), fn(X)[0])


def _plain(x):
    return jax.random.key_data(x) if jnp.issubdtype(jax.typeof(x).dtype, jax.dtypes.prng_key) else x


def _product(x, y=3.0):
    return jnp.sin(x) * x * y


FORWARD = {
    "jvp": lambda f: jax.jvp(f, (2.0,), (1.0,)),
    "jvp of two": lambda f: jax.jvp(f, (2.0, 1.0), (1.0, 0.5)),
    "linearize": lambda f: (jax.linearize(f, 2.0)[0], jax.linearize(f, 2.0)[1](1.0)),
    "jacfwd": lambda f: jax.jacfwd(f)(2.0),
    "hessian": lambda f: jax.hessian(f)(2.0),
    "closed over": lambda f: jax.jvp(lambda y: f(3.0, y), (2.0,), (1.0,)),
    "jit": lambda f: jax.jit(lambda x: jax.jvp(f, (x,), (1.0,)))(2.0),
}


@pytest.mark.parametrize(
    ("mode", "policy"),
    kept(
        itertools.product(FORWARD, [jc.Exact(), jax.checkpoint_policies.nothing_saveable]),
        [(mode, jc.Exact()) for mode in FORWARD],
    ),
)
def test_forward_mode_of_python_scalars(mode, policy):
    made, expected = (FORWARD[mode](f) for f in (jc.checkpoint(_product, policy), _product))
    assert_close(made, expected)
    for a, e in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        assert jax.typeof(a).weak_type == jax.typeof(e).weak_type
