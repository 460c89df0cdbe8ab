"""Derivatives whose range is known need no pass that looks for it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp as jc
from jaxcomp.transform._choice.bounds import bounds
from jaxcomp.transform._choice.graph import Graph
from jaxcomp.transform._program.builder import flat
from jaxcomp.transform._program.program import Program
from tests.helpers import assert_close, normal

CODEC = jc.Quantize(bits=4)
GELU = (-0.1289, 1.1289)  # the range of its derivative


def found(fn, *args):
    program = flat(Program.trace(fn, *args))
    return bounds(Graph(program, set()), program.results[0])


def derivative(fn):
    return lambda x: jax.jvp(fn, (x,), (jnp.ones_like(x),))[1]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("fn", "expected"), [(jax.nn.gelu, GELU), (jax.nn.silu, (-0.0998, 1.0998)), (jnp.tanh, (0, 1))]
)
def test_bounds_of_derivatives(fn, expected, dtype):
    low, high = found(derivative(fn), jnp.ones((3, 5), dtype))
    eps = float(jnp.finfo(dtype).eps)
    assert expected[0] - 4 * eps < low <= expected[0] + eps
    assert expected[1] - eps <= high < expected[1] + 4 * eps


def test_no_number_is_out_of_bounds():
    x = jax.lax.bitcast_convert_type(jnp.arange(2**16, dtype=jnp.uint16), jnp.bfloat16)
    x = jnp.where(jnp.abs(x) < 1e15, x, 0)  # beyond, JAX's derivative is NaN
    low, high = found(derivative(jax.nn.gelu), x)
    made = np.asarray(derivative(jax.nn.gelu)(x), np.float32)
    assert low < made.min() <= made.max() < high


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jnp.tanh(x) * x[:1],  # not elementwise
        lambda x: jnp.cumsum(x, 0),
        lambda x: x,
        lambda x: jnp.tanh(x.astype(jnp.float32).sum(0)),
        lambda x: jnp.tanh(x) + normal((4, 3)).astype(x.dtype),  # of two arrays
        jnp.square,  # unbounded, as are the next
        jnp.exp,
        lambda x: jnp.log(-1 - jnp.square(x)),  # not a number anywhere
        lambda x: jax.nn.gelu(x) * derivative(jax.nn.gelu)(x),
    ],
)
def test_other_values_have_none(fn):
    assert found(fn, jnp.ones((4, 3), jnp.bfloat16)) is None


def test_wide_floats_have_none():
    assert found(derivative(jax.nn.gelu), jnp.ones((4, 3))) is None


def loss(w, x):
    return jnp.square(jax.nn.gelu(x @ w) @ V).astype(jnp.float32).mean()


X, W = normal((8, 64, 32), jnp.bfloat16), 0.3 * normal((32, 64), jnp.bfloat16, 1)
V = normal((64, 16), jnp.bfloat16, 2)


def coded(w, x, seed=None):
    return jc.checkpoint(loss, policy=CODEC)(w, x)


def test_a_range_is_not_looked_for_and_the_plan_counts_it():
    plan = jc.checkpoint(loss, policy=CODEC).plan(W, X)
    (stored,) = [v for v in plan.values if v.role == "derivative" and v.shape == (8, 64, 64)]
    assert stored.saved_bytes == 8 * 64 * 64 // 2 + 2 * 2
    narrow, wide = (
        str(jax.make_jaxpr(jax.grad(coded))(W.astype(d), X.astype(d)))
        for d in (jnp.bfloat16, jnp.float32)
    )
    assert narrow.count("reduce_min") == wide.count("reduce_min") - 1


def test_the_gradient_is_near_and_repeats():
    gradient = jax.jit(jax.grad(coded))
    got, expected = (f(W, X).astype(jnp.float32) for f in (gradient, jax.grad(loss)))
    assert float(jnp.linalg.norm(got - expected) / jnp.linalg.norm(expected)) < 0.1
    np.testing.assert_array_equal(gradient(W, X), gradient(W, X))


def test_bounds_are_found_inside_transformations():
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))

    def part(w, x):
        return jax.lax.pmean(jax.grad(coded)(w, x), "batch")

    specs = {"in_specs": (jax.P(), jax.P("batch")), "out_specs": jax.P(), "check_vma": False}
    spread = jax.jit(jax.shard_map(part, mesh=mesh, **specs))(W, X)
    alone = jax.jit(jax.vmap(jax.grad(coded), (None, 0)))(W, X[:, None])
    alone = jnp.mean(alone, 0, jnp.float32)
    assert_close(spread, alone, 0.1)
