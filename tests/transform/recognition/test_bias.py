"""What a plan says of the bias of norms over few positions is what the gradients show."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxcomp as jc
from tests.helpers import kept, normal

DRAWS = 1024


def _norm(x, axis):
    mean, variance = x.mean(axis, keepdims=True), x.var(axis, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5)


def batch_norm(x):
    return jax.nn.relu(_norm(x, 0))


def residual(x):
    return jax.nn.relu(_norm(x, 0) + normal(x.shape, seed=2))


def silu(x):
    return jax.nn.silu(_norm(x, (0, 1, 2)))


def layer_norm(x):
    return jax.nn.standardize(x) ** 3


CASES = {
    "batch norm of 8": (batch_norm, (8, 256), "fused:bits=3"),
    "batch norm of 8, 4 bits": (batch_norm, (8, 1024), "fused:bits=4"),
    "residual of 16": (residual, (16, 128), "fused:bits=3"),
    "silu of 16": (silu, (1, 4, 4, 512), "automatic:bits=3"),
    "layer norm of 96": (layer_norm, (32, 96), jc.Quantize(bits=1)),
}


@pytest.mark.parametrize(
    "case", kept(CASES, ("batch norm of 8", "residual of 16", "layer norm of 96"))
)
def test_a_plan_says_the_bias(case):
    fn, shape, policy = CASES[case]
    x, cotangent = normal(shape), normal(shape, seed=1)
    weights = jnp.eye(shape[-1])

    def gradient(of):
        return jax.grad(lambda x: (of(x @ weights) * cotangent).sum())(x)

    def coded(seed):
        return jc.checkpoint(lambda x, weights: fn(x @ weights), policy, seed=seed)

    exact = jax.jit(lambda: gradient(fn))()
    exact /= (exact**2).sum()

    def slope(seed):
        of = coded(seed)
        found = jax.grad(lambda x: (of(x, weights) * cotangent).sum())(x)
        return (found * exact).sum()

    slopes = np.asarray(jax.jit(lambda seeds: lax.map(slope, seeds))(jnp.arange(DRAWS)))
    (note,) = {v.note for v in coded(0).plan(x, weights).values if "for normal values" in v.note}
    said = float(re.search(r"([\d.e-]+)% for normal", note)[1]) / 100
    found, chance = 1 - slopes.mean(), slopes.std() / DRAWS**0.5
    assert 0.5 * said - 5 * chance < found < 1.5 * said + 5 * chance
    assert found > 5 * chance


def test_a_plan_says_nothing_of_norms_over_many_positions():
    plan = jc.checkpoint(lambda x, w: batch_norm(x @ w), "fused:bits=4").plan(
        normal((256, 64)), jnp.eye(64)
    )
    assert [value.op for value in plan.values] == ["norm_act"]
    assert not any("normal values" in value.note for value in plan.values)
