"""Gradients for every set of differentiated arguments, once and for several sets in one loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.helpers import kept, normal
from tests.sweep.combinations import SETS, B, Combination, W, X, combinations

COTANGENT = normal(X.shape, seed=4)
_ORDERS = (SETS, SETS[::-1])


def _frozen(arguments, differentiated):
    return [a if i in differentiated else lax.stop_gradient(a) for i, a in enumerate(arguments)]


def _gradients(f, orders):
    """By set: the gradient of a loss with one call; by order: that of one call for each set."""

    def loss(arguments, sets):
        w, x, b = arguments
        total = jnp.float32(0)
        for number, differentiated in enumerate(sets):
            of_call = w, jnp.roll(x, number, axis=0), b * (1 + 0.1 * number)
            result = f(*_frozen(of_call, differentiated))
            total += jnp.vdot(result, jnp.roll(COTANGENT, number, axis=1))
        return total

    def all_of_them(arguments):
        runs = [(s,) for s in SETS] + list(orders)
        return [jax.value_and_grad(loss)(arguments, sets) for sets in runs]

    return jax.jit(all_of_them)([W, X, B])


def check(combination: Combination, orders=_ORDERS) -> None:
    """Raises an AssertionError that names the sets of which a gradient is wrong."""
    stock, coded = combination.functions()
    wrong = []
    pairs = zip(_gradients(coded, orders), _gradients(stock, orders), strict=True)
    for number, ((loss, gradient), (expected_loss, expected)) in enumerate(pairs):
        name = SETS[number] if number < len(SETS) else f"all, order {number - len(SETS)}"
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-4, atol=1e-2)
        for i, (one, other) in enumerate(zip(gradient, expected, strict=True)):
            distance, scale = jnp.linalg.norm(one - other), jnp.linalg.norm(other)
            if not distance <= combination.error * scale:
                wrong.append(f"{name}: argument {i} by {distance / scale:.2g}")
    assert not wrong, f"{combination}: {'; '.join(wrong)}"


# Each kind once, and other policies and wrappers; then each policy.
SAMPLE = [
    Combination("model", "exact", ("vmap",)),
    Combination("layers", "nothing_saveable", ("cond",)),
    Combination("operations", "quantize", ("scan",)),
    Combination("function", "fused", ("custom_vjp",)),
]
MORE = [
    Combination("operations", "float8", ("shard_map",)),
    Combination("operations", "offload", ("checkpoint",)),
    Combination("function", "automatic", ("none",)),
]


@pytest.mark.parametrize("combination", kept(SAMPLE + MORE, SAMPLE), ids=str)
def test_gradients_of_a_sample(combination):
    check(combination, _ORDERS[:1])


@pytest.mark.slow
@pytest.mark.parametrize("combination", combinations(1) + combinations(2), ids=str)
def test_gradients(combination):
    check(combination)
