"""Derivatives with poles are encoded together with what makes them small again."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxcomp as jc
from tests.helpers import normal

ROWS, WIDTH, CLASSES = 32, 16, 512
DRAWS = jnp.arange(12, dtype=jnp.uint32)
LABELS = jax.random.randint(jax.random.key(2), (ROWS,), 0, CLASSES)
ONE_HOT = jax.nn.one_hot(LABELS, CLASSES)
TARGETS = jax.nn.softmax(4 * normal((ROWS, CLASSES), seed=9))


def chosen(values):
    return values[jnp.arange(ROWS), LABELS]


# Of logits whose standard deviation is 3.
LIKELIHOODS = {
    "chosen": lambda z: chosen(jnp.log(jax.nn.softmax(z))),
    "chosen before": lambda z: jnp.log(chosen(jax.nn.softmax(z))),
    "chosen along an axis": lambda z: jnp.take_along_axis(
        jnp.log(jax.nn.softmax(z) + 1e-8), LABELS[:, None], axis=1
    ),
    "one-hot": lambda z: ONE_HOT * jnp.log(jax.nn.softmax(z) + 1e-9),
    "clipped": lambda z: ONE_HOT * jnp.log(jnp.clip(jax.nn.softmax(z), 1e-7, 1 - 1e-7)),
    "where": lambda z: jnp.where(ONE_HOT > 0, jnp.log(jax.nn.softmax(z)), 0.0),
    "targets": lambda z: TARGETS * jnp.log(jax.nn.softmax(z) + 1e-9),
    "focal": lambda z: focal(jax.nn.softmax(z)),
    "bfloat16": lambda z: chosen(
        jnp.log(jax.nn.softmax(z.astype(jnp.bfloat16)).astype(jnp.float32) + 1e-9)
    ),
}


def focal(p):
    return ONE_HOT * (1 - p) ** 2 * jnp.log(p + 1e-9)


def square_distances(points):
    return jnp.square(points[:, None] - points[None]).sum(-1)


def others(points):
    return ~jnp.eye(len(points), dtype=bool)


# Of 128 points and two functions of them.
MASKED = {
    "reciprocal": lambda p, a, b: jnp.where(others(p), 1 / (square_distances(p) + 1e-6), 0.0),
    "product": lambda p, a, b: others(p).astype(p.dtype) / (square_distances(p) + 1e-6),
    "root": lambda p, a, b: jnp.where(others(p), lax.rsqrt(square_distances(p) + 1e-10), 0.0),
    "power": lambda p, a, b: jnp.where(others(p), (square_distances(p) + 1e-6) ** -1.5, 0.0),
    "ratio": lambda p, a, b: jnp.where(b > 0.1, jnp.tanh(a) / (jax.nn.relu(b) + 1e-8), 0.0),
    "exponential": lambda p, a, b: jnp.where(a < 0, jnp.exp(a), 0.0),
    "exponential, product": lambda p, a, b: jnp.exp(a) * (a < 0).astype(a.dtype),
    "exponential, scaled": lambda p, a, b: jnp.where(a < 0, jnp.tanh(b) * jnp.exp(a) / 2, 0.0),
    "sixth power": lambda p, a, b: jnp.where(jnp.abs(a) < 1, a**6 * jnp.sin(b), 0.0),
    "logarithm": lambda p, a, b: jnp.where(b > 0.1, jnp.log(jax.nn.relu(b) + 1e-8), 0.0),
}


def likelihood(form, x, w):
    return -LIKELIHOODS[form](x @ w).sum() / ROWS


def masked(form, points, w):
    places = (points @ w[0])[:, :3]
    values = MASKED[form](places, points @ w[0], points @ w[1])
    return jnp.square(jnp.tanh(values @ points)).mean()


LOSSES = {name: functools.partial(likelihood, name) for name in LIKELIHOODS} | {
    f"masked {name}": functools.partial(masked, name) for name in MASKED
}


def arguments(name):
    if name in LIKELIHOODS:
        return normal((ROWS, WIDTH)), 0.75 * normal((WIDTH, CLASSES), seed=1)
    return normal((128, WIDTH)), normal((2, WIDTH, 128), seed=1)


def assert_right(of_seed, exact, noise=0.5):
    """The mean of several gradients is the exact one, and each is near it."""
    drawn = jax.jit(lambda seeds: lax.map(of_seed, seeds))(DRAWS)
    for found, expected in zip(jax.tree.leaves(drawn), jax.tree.leaves(exact), strict=True):
        expected = expected[None]
        along = (found * expected).reshape(len(DRAWS), -1).sum(1) / jnp.vdot(expected, expected)
        error = float(along.std(ddof=1)) / len(DRAWS) ** 0.5
        assert abs(float(along.mean()) - 1) < 5 * error + 0.01
        far = jnp.sqrt(jnp.square(found - expected).mean(0).sum() / jnp.vdot(expected, expected))
        assert 0 < far < noise


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_right_with_codes_of_4_bits(name):
    loss, given = LOSSES[name], arguments(name)
    exact = jax.jit(jax.grad(loss, (0, 1)))(*given)
    assert_right(
        lambda seed: jax.grad(jc.checkpoint(loss, jc.Quantize(4), seed=seed), (0, 1))(*given), exact
    )


def scanned(loss, x, w):
    step = lambda total, x: (total + loss(x, w), None)  # noqa: E731
    return lax.scan(step, 0.0, jnp.stack([x, -x]))[0]


WRAPPERS = {
    "jit": lambda loss: jax.jit(loss),
    "checkpoint": lambda loss: jax.checkpoint(loss),
    "scan": lambda loss: functools.partial(scanned, loss),
    "vmap": lambda loss: lambda x, w: jax.vmap(loss, (0, None))(jnp.stack([x, -x]), w).sum(),
}


@pytest.mark.parametrize("name", ["chosen", "masked ratio", "masked exponential"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gradients_are_right_inside_of_transformations(name, wrapper):
    loss, given = WRAPPERS[wrapper](LOSSES[name]), arguments(name)
    for argument in (0, 1):
        exact = jax.jit(jax.grad(loss, argument))(*given)
        coded = lambda seed, a=argument: jax.grad(  # noqa: E731
            jc.checkpoint(loss, jc.Quantize(4), seed=seed), a
        )(*given)
        assert_right(coded, exact, noise=0.8)


def two_ends(w):
    """The first derivative's path ends after the second's."""
    x, (a, b) = normal((64, 64)), (jnp.log(jnp.square(normal((64, 64)) @ v) + 0.1) for v in w)
    return (a * jnp.abs(x)).sum() + ((b * jnp.cos(x)) * jnp.abs(x))[:32].sum()


def twice(w):
    y = jnp.log(jnp.square(normal((64, 64)) @ w[0]) + 0.1)
    return ((y + y) * jnp.abs(normal((64, 64), seed=2))).sum()


def both_cases(w):
    y = normal((64, 64)) @ w[0] / (jnp.square(normal((64, 64), seed=3) @ w[1]) + 0.1)
    chosen = jnp.where(normal((64, 64), seed=4) > 0, y, jnp.sin(y))
    return (chosen[1:] - chosen[:-1] / (1.5 + jnp.cos(y))[1:]).sum()


def unrolled(w):
    h, total = jnp.square(normal((64, 64)) @ w[0]) + 1, 0.0
    for _ in range(4):
        h = 1.5 + jnp.abs(normal((64, 64), seed=2)) / h
        total += jnp.tanh(h @ w[1]).mean()
    return total


@pytest.mark.parametrize("function", [two_ends, twice, both_cases, unrolled])
def test_paths_that_meet_and_part_are_right(function):
    w = normal((2, 64, 64), seed=1) / 8
    assert_right(
        lambda seed: jax.grad(jc.checkpoint(function, jc.Quantize(8), seed=seed))(w),
        jax.jit(jax.grad(function))(w),
        noise=0.1,
    )


def test_the_derivative_of_a_logarithm_costs_no_more_than_the_usual_form():
    x, w = normal((64, 64)), normal((64, 1000), seed=1)
    labels = jnp.arange(64)

    def bytes_of(log_probabilities):
        def loss(w):
            return -log_probabilities(x @ w)[labels, labels].mean()

        return jc.checkpoint(loss, "quantize:bits=4").plan(w).saved_bytes

    usual = bytes_of(jax.nn.log_softmax)
    assert bytes_of(lambda z: jnp.log(jax.nn.softmax(z))) <= usual + 2 * 4 * len(labels)


def test_the_value_has_the_same_bits():
    for name, loss in LOSSES.items():
        given = arguments(name)
        coded = jc.checkpoint(loss, jc.Quantize(4))
        expected, found = jax.jit(loss)(*given), jax.jit(jax.value_and_grad(coded))(*given)[0]
        np.testing.assert_array_equal(found, expected)
