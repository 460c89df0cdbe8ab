"""Libraries that replace functions of JAX during a user's call act once on each of its calls."""

import contextlib
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx
from jax import lax

import jaxcomp as jc
from tests.helpers import distance, normal, slow

X, V, W = normal((64, 24)), normal((24, 24), seed=1) / 5, normal((24, 24), seed=2) / 5
IMAGES, KERNEL = normal((4, 8, 8, 3)), normal((3, 3, 3, 16), seed=1) / 5
KERNEL_2 = normal((3, 3, 16, 16), seed=2) / 12
called = []  # what acts, and how often


def _act(*args, **kwargs):
    from tests.transform import test_interceptors  # its globals are those of another module

    return test_interceptors.called[-1](*args, **kwargs)


@contextlib.contextmanager
def replaced(function):
    """Doubles what a function of JAX returns, wherever it is called, and counts the calls."""
    stock = types.FunctionType(function.__code__, function.__globals__)
    stock.__defaults__, stock.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    counts = []

    def doubled(*args, **kwargs):
        counts.append(function.__name__)
        return 2 * stock(*args, **kwargs)

    called.append(doubled)
    function.__code__ = _act.__code__
    try:
        yield counts
    finally:
        function.__code__ = stock.__code__
        called.remove(doubled)


def dot(x, w):
    return lax.dot_general(x, w, (((1,), (0,)), ((), ())))


def product(x, v, w):
    return dot(jnp.sin(dot(x, v)), w)


def loop(x, v, w):
    return lax.scan(lambda x, w: (dot(jnp.tanh(dot(x, v)), w), None), x, jnp.stack([w, w]))[0]


def inner(x, v, w):
    return dot(jax.checkpoint(lambda x: jnp.tanh(dot(x, v)))(x), w)


def own_rule():
    own = jax.custom_vjp(dot)
    own.defvjp(
        lambda x, w: (own(x, w), (x, w)),
        lambda saved, g: (dot(g, saved[1].T), dot(saved[0].T, g)),
    )
    return lambda x, v, w: own(jnp.sin(own(x, v)), w)


def convolution(x, v, w):
    def layer(x, kernel):
        y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=NUMBERS)
        h = jax.nn.standardize(y, (0, 1, 2), epsilon=1e-5)
        return jax.nn.relu(h * jnp.ones((1, 1, 1, 16)) + jnp.zeros((1, 1, 1, 16)))

    return layer(layer(x, v), w)


NUMBERS = "NHWC", "HWIO", "NHWC"
CASES = {
    "product": (product, lax.dot_general, (X, V, W)),
    "loop": (loop, lax.dot_general, (X, V, W)),
    "inner checkpoint": (inner, lax.dot_general, (X, V, W)),
    "custom_vjp": (own_rule, lax.dot_general, (X, V, W)),
    "convolution": (convolution, lax.conv_general_dilated, (IMAGES, KERNEL, KERNEL_2)),
}
POLICIES = {
    "exact": jc.Exact(),
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "codes": jc.Quantize(bits=8),
}


@pytest.mark.parametrize(
    ("case", "policy"),
    [
        *itertools.product([case for case in CASES if case != "convolution"], ["codes"]),
        slow("convolution", "codes"),
        *itertools.product(["product", "convolution"], ["exact"]),
        *itertools.product(["loop", "inner checkpoint", "custom_vjp"], ["nothing"]),
        ("convolution", "fused:bits=4"),
    ],
)
def test_what_replaces_a_function_acts_on_the_users_calls_alone(case, policy):
    _, function, arguments = CASES[case]

    def made_anew():
        """JAX keeps what it traced of a function, with the one that is replaced or without."""
        fn = CASES[case][0]
        return fn() if fn is own_rule else functools.wraps(fn)(lambda *args: fn(*args))

    def gradient(fn):
        counts = []

        def loss(*arguments):
            with replaced(function) as counted:
                y = fn(*arguments)
            counts.extend(counted)
            return (jnp.sin(y) * normal(y.shape, seed=3)).sum()

        return jax.grad(loss, (1, 2))(*arguments), counts

    exact, in_stock = gradient(jax.jit(made_anew()))
    found, in_ours = gradient(jc.checkpoint(made_anew(), POLICIES.get(policy, policy)))
    assert len(in_ours) == len(in_stock) > 0
    error = max(distance(one, other) for one, other in zip(found, exact, strict=True))
    assert error < {"codes": 0.03, "fused:bits=4": 0.3}.get(policy, 1e-5)


class Hooked(nnx.Module):
    """A layer whose parameter is doubled where it is read, and whose counter is where it is set."""

    def __init__(self, seen):
        def see(name, factor):
            return lambda _, value: (seen.append(name), factor * value)[1]

        self.weight = nnx.Param(W, on_get_value=see("get", 2))
        self.count = nnx.BatchStat(jnp.ones(()), on_set_value=see("set", 2))

    def __call__(self, x):
        self.count.set_value(self.count.get_value() + 1)
        return jnp.tanh(dot(x, self.weight.get_value()))


@pytest.mark.filterwarnings("ignore:Variable hooks are deprecated")
def test_hooks_of_variables_act_once():
    results = []
    for compressed in (False, True):
        seen = []
        model = Hooked(seen)
        if compressed:
            jc.compress(model, jc.Exact())
        seen.clear()
        gradient = nnx.jit(nnx.grad(lambda model: model(X).sum()))(model)
        results.append((seen, float(model.count.get_raw_value()), jax.tree.leaves(gradient)))
    (seen, count, exact), (in_ours, same, found) = results
    assert in_ours == seen == ["set", "get"]
    assert count == same == 4
    assert distance(found, exact) < 1e-6


def test_intercepted_methods_of_linen_act_once():
    layer = linen.Dense(24)
    variables = layer.init(jax.random.key(0), X)
    results = []
    for apply in (layer.apply, jc.checkpoint(layer.apply, jc.Exact())):
        seen = []

        def doubled(method, args, kwargs, context, seen=seen):
            seen.append(context.method_name)
            return 2 * method(*args, **kwargs)

        with linen.intercept_methods(doubled):
            gradient = jax.grad(lambda v, apply=apply: jnp.sin(apply(v, X)).sum())(variables)
        results.append((seen, gradient))
    (seen, exact), (in_ours, found) = results
    assert in_ours == seen == ["__call__"]
    assert distance(found, exact) < 1e-6
