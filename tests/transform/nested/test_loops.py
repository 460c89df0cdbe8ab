"""`checkpoint` of functions with `scan` loops, whose iterations store by the policy."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxcomp as jc
from jaxcomp import memory
from jaxcomp.codecs._codec import array_nbytes
from tests.helpers import (
    assert_close,
    assert_same_bits,
    assert_scattered_by_chance,
    distance,
    kept,
    normal,
    only,
    replicate,
    shard,
    slow,
)

X = normal((32, 64))
UP, DOWN = 0.2 * normal((3, 64, 96), seed=1), 0.2 * normal((3, 96, 64), seed=2)
EXACT, CODEC = jc.Exact(), jc.Quantize(bits=4)


def _mlp(x, weights):
    up, down = weights
    hidden = checkpoint_name(jax.nn.gelu(x @ up), "hidden")
    return x + hidden @ down, jnp.sum(jnp.sin(x))


def _stack(x, up, down):
    x, sums = lax.scan(_mlp, x, (up, down))
    return jnp.mean(x**2) + jnp.mean(sums)


def _with_constants(x, up, down):
    """The weights are the same in each iteration, an integer is counted beside."""

    def body(carry, t):
        x, i = carry
        return (x + t * jax.nn.gelu(x @ up[0]) @ down[0], i + 1), i

    (x, count), order = lax.scan(body, (x, 0), jnp.arange(1.0, 4.0), reverse=True, unroll=2)
    return jnp.mean(x**2) * count + order.sum()


def _nested(x, up, down):
    def outer(x, weights):
        return lax.scan(lambda x, t: (x + t * _mlp(x, weights)[0], None), x, jnp.arange(2.0))[0], 0

    return jnp.mean(lax.scan(outer, x, (up, down))[0] ** 2)


def _mapped(x, up, down):
    """Each row by itself; what is mapped over is no argument."""
    return jnp.mean(lax.map(lambda row: jax.nn.gelu(row @ up[0]) @ down[0], x @ x.T @ x) ** 2)


def _counted(x, up, down):
    def body(i, x):
        return x + jax.nn.gelu(x @ up[i]) @ down[i]

    return jnp.mean(lax.fori_loop(0, 3, body, x) ** 2)


def _after_a_constant(x, up, down):
    """The state depends on the weights only after the first iteration."""
    start = jnp.zeros_like(x)

    def body(carry, weights):
        state, unused = carry
        return (jnp.tanh(state + x @ weights[0] @ weights[1]), unused), None

    return jnp.sum(lax.scan(body, (start, start), (up, down))[0][0] ** 2)


FUNCTIONS = [_stack, _with_constants, _nested, _mapped, _counted, _after_a_constant]


def _gradients(function, *args):
    return jax.jit(jax.grad(function, (0, 1, 2)))(*args)


@pytest.mark.parametrize("function", kept(FUNCTIONS, (_with_constants, _nested, _after_a_constant)))
def test_gradients(function):
    expected = _gradients(function, X, UP, DOWN)
    exact, coded = jc.checkpoint(function, EXACT), jc.checkpoint(function, CODEC)
    assert_same_bits(jax.jit(coded)(X, UP, DOWN), jax.jit(function)(X, UP, DOWN))
    assert distance(_gradients(exact, X, UP, DOWN), expected) < 1e-5
    assert 1e-3 < distance(_gradients(coded, X, UP, DOWN), expected) < 0.5


@pytest.mark.parametrize("function", kept(FUNCTIONS, (_stack, _with_constants, _nested)))
def test_the_plan_has_the_bytes_that_wait(function):
    function = jc.checkpoint(function, CODEC)
    backward = jax.eval_shape(lambda *args: jax.vjp(function, *args)[1], X, UP, DOWN)
    leaves = jax.tree.leaves(backward)
    arguments = {(a.shape, a.dtype) for a in (X, UP, DOWN)}
    waiting = [leaf for leaf in leaves if (leaf.shape, leaf.dtype) not in arguments]
    numbers = [leaf for leaf in waiting if leaf.ndim < 2 and leaf.size <= 3]  # looped over, seeds
    plan = function.plan(X, UP, DOWN)
    least, most = (
        sum(array_nbytes(leaf.shape, leaf.dtype) for leaf in some) for some in (numbers, waiting)
    )
    assert most - least <= plan.saved_bytes <= most
    assert plan.saved_bytes < 0.2 * plan.exact_bytes


def test_each_iteration_is_planned():
    values = jc.checkpoint(_stack, CODEC).plan(X, UP, DOWN).values
    inside = [v for v in values if v.note.startswith("3 iterations")]
    assert {(v.shape, v.role) for v in inside if v.role != "statistic"} == {
        ((3, 32, 64), "input"),
        ((3, 32, 64), "derivative"),
        ((3, 32, 96), "operand"),
        ((3, 32, 96), "derivative"),
    }
    assert {v.decision for v in inside} == {str(CODEC)}
    operand = next(v for v in inside if v.role == "operand")
    assert operand.exact_bytes == 3 * 32 * 96 * 4
    assert operand.saved_bytes == 3 * CODEC.nbytes((32, 96), jnp.float32)
    assert operand.source.startswith("test_loops.py:")


def test_an_inner_loop_is_planned_for_both():
    values = jc.checkpoint(_nested, CODEC).plan(X, UP, DOWN).values
    assert (3, 2, 32, 96) in {v.shape for v in values}
    assert all("3 iterations; 2 iterations" in v.note for v in values if len(v.shape) == 4)


def test_unbiased_over_seeds():
    def draw(seed):
        return _gradients(jc.checkpoint(_stack, jc.Quantize(bits=2), seed=seed), X, UP, DOWN)

    draws = jax.jit(lambda: lax.map(draw, jnp.arange(64)))()
    expected = _gradients(jc.checkpoint(_stack, EXACT), X, UP, DOWN)
    assert_scattered_by_chance(draws, expected)


def test_iterations_round_equal_values_differently():
    def same(x, up):
        return lax.scan(lambda c, w: (c, jnp.sin(x) @ w), 0.0, up)[1].sum(1)

    coded = jc.checkpoint(same, jc.Quantize(bits=2), coded_argnums=0)
    _, pull = jax.vjp(lambda up: coded(X, up), jnp.stack([UP[0], UP[0]]))
    (gradient,) = pull(jnp.ones((2, 96)))
    # What each reads is made outside of the loop, once: the same code serves both.
    assert_same_bits(gradient[0], gradient[1])

    def made_inside(x, up):
        return lax.scan(lambda c, w: (jnp.abs(c), jnp.abs(c) @ w), jnp.abs(x), up)[1].sum(1)

    coded = jc.checkpoint(made_inside, jc.Quantize(bits=2), coded_argnums=0)
    _, pull = jax.vjp(lambda up: coded(X, up), jnp.stack([UP[0], UP[0]]))
    (gradient,) = pull(jnp.ones((2, 96)))
    assert distance(gradient[0], gradient[1]) > 1e-3


def test_what_is_frozen_stores_nothing():
    def stack(up, down, x):
        return _stack(x, up, down)

    def waiting(argnums):
        function = jc.checkpoint(stack, CODEC)
        run = jax.eval_shape(
            lambda *args: jax.vjp(
                lambda *some: function(*some, *args[len(argnums) :]), *args[: len(argnums)]
            )[1],
            UP,
            DOWN,
            X,
        )
        return [leaf.shape for leaf in jax.tree.leaves(run)]

    coded = CODEC.encode(X @ UP[0], 0).arrays[0].shape
    assert waiting((0, 1)).count((3, *coded)) == 2  # operand and derivative
    assert waiting((0,)).count((3, *coded)) == 1  # of a frozen product, no operand


@pytest.mark.parametrize(
    ("policy", "stored"),
    [
        (
            only(CODEC, names=("hidden",)) + only(jc.Cast("bfloat16")),
            {"operand"},
        ),
        (jc.recipes.boundary(jc.Quantize(bits=8)), {"input"}),
    ],
)
def test_policies_are_asked_in_the_loop(policy, stored):
    plan = jc.checkpoint(_stack, policy, coded_argnums=0).plan(X, UP, DOWN)
    coded = {v.role for v in plan.values if v.decision.startswith("Quantize") and len(v.shape) == 3}
    assert coded == stored
    function = jc.checkpoint(_stack, policy, coded_argnums=0)
    assert distance(_gradients(function, X, UP, DOWN), _gradients(_stack, X, UP, DOWN)) < 0.2


def test_the_least_size_counts_all_iterations():
    def decisions(min_size):
        policy = jc.Policy((jc.Rule(CODEC, min_size=min_size),))
        return jc.checkpoint(_nested, policy).plan(X, UP, DOWN)

    elements = 3 * 2 * 32 * 64  # of the carry of the inner loop
    coded = {v.shape for v in decisions(elements).values if v.decision.startswith("Quantize")}
    assert (3, 2, 32, 64) in coded
    fewer = decisions(elements + 1)
    exact = [v for v in fewer.values if v.decision == "exact" and v.shape == (3, 2, 32, 64)]
    assert exact
    assert all("fewer than 12,289 elements" in v.note for v in exact)
    assert any(v.decision.startswith("Quantize") for v in fewer.values)  # (3, 2, 32, 96)


def test_jax_policies_are_asked_in_the_loop():
    few, many = (
        jc.checkpoint(_stack, policy).plan(X, UP, DOWN)
        for policy in (
            jax.checkpoint_policies.nothing_saveable,
            jax.checkpoint_policies.dots_saveable,
        )
    )
    # The inputs of the iterations, and the loop's result, which the square's derivative reads.
    assert [v.shape for v in few.values] == [(32, 64), (3, 32, 64)]
    assert (3, 32, 96) in {v.shape for v in many.values}


@pytest.mark.aot
def test_codes_of_iterations_wait_in_the_hosts_memory():
    offloading, keeping = (jc.checkpoint(_stack, codec) for codec in (jc.Offload(CODEC), CODEC))
    assert_close(*(_gradients(f, X, UP, DOWN) for f in (offloading, keeping)), 1e-6)
    moved, kept = (
        memory.analyze(jax.grad(f, (0, 1, 2)), X, UP, DOWN, target="h100")
        for f in (offloading, keeping)
    )
    assert moved.declared_residual_bytes == 0 < kept.declared_residual_bytes
    assert moved.host_temp_bytes >= kept.declared_residual_bytes > kept.host_temp_bytes == 0


def test_a_rule_that_matches_nothing_is_told_what_is_in_the_loop():
    policy = only(CODEC, names=("absent",))
    with pytest.raises(ValueError, match=r"names: hidden; primitives: .*tanh"):
        _gradients(jc.checkpoint(_stack, policy), X, UP, DOWN)


def test_vmap_and_sharded_arguments():
    function = jc.checkpoint(_stack, jc.Quantize(bits=8))
    expected = _gradients(_stack, X, UP, DOWN)
    many = jax.jit(jax.vmap(jax.grad(function, (0, 1, 2)), (0, None, None)))(
        jnp.stack([X, X]), UP, DOWN
    )
    assert distance(jax.tree.map(lambda g: g[0], many), expected) < 0.02
    sharded = _gradients(function, shard(X), replicate(UP), replicate(DOWN))
    assert distance(sharded, _gradients(function, X, UP, DOWN)) < 0.02


@pytest.mark.slow
def test_shards():
    function = jc.checkpoint(_stack, jc.Quantize(bits=8))
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))

    def mean(x, up, down):
        def local(x, up, down):
            return lax.pmean(function(x, up, down), "batch")

        specs = jax.P("batch"), jax.P(), jax.P()
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=jax.P())(x, up, down)

    def exact(x, up, down):
        parts = x.reshape(8, -1, x.shape[-1])
        return jnp.mean(jax.vmap(_stack, (0, None, None))(parts, up, down))

    assert distance(_gradients(mean, X, UP, DOWN), _gradients(exact, X, UP, DOWN)) < 0.02


@pytest.mark.parametrize(
    ("policy", "check"),
    [
        (jc.Quantize(bits=8), True),
        (EXACT, False),
        slow(jc.Quantize(bits=8), False),
        slow(EXACT, True),
    ],
)
def test_collectives_in_and_after_the_loop(policy, check):
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(x, up, down):
        def body(x, weights):
            return _mlp(x + 0.1 * lax.pmean(x, "batch"), weights)[0], None

        return lax.psum(jnp.sum(lax.scan(body, x, (up, down))[0] ** 2), "batch")

    def gradients(function):
        specs = jax.P("batch"), jax.P(), jax.P()
        mapped = jax.shard_map(
            function, mesh=mesh, in_specs=specs, out_specs=jax.P(), check_vma=check
        )
        return _gradients(mapped, X, UP, DOWN)

    error = distance(gradients(jc.checkpoint(local, policy)), gradients(local))
    assert error < (1e-5 if policy == EXACT else 0.02)


def test_a_policy_decides_about_what_the_function_computes():
    """Not about the iteration count and other values of the loop itself."""
    with pytest.raises(ValueError, match="matches nothing") as error:
        jc.checkpoint(_stack, only("keep", names=("absent",))).plan(X, UP, DOWN)
    (primitives,) = re.findall("primitives: (.*?);", str(error.value))
    assert {"tanh", "dot_general"} <= set(primitives.split(", "))
    (roles,) = re.findall("roles: (.*?);", str(error.value))
    assert "index" not in roles


def test_no_loop_runs_again_as_a_whole():
    def products(function):
        found = jax.make_jaxpr(jax.grad(function, (0, 1, 2)))(X, UP, DOWN)
        return len(re.findall("dot_general", str(found)))

    few = jc.checkpoint(_stack, jax.checkpoint_policies.nothing_saveable)
    many = jc.checkpoint(_stack, jax.checkpoint_policies.dots_saveable)
    assert products(many) == products(_stack)
    assert products(few) == products(_stack) + 1  # of an iteration, the first of its two again


def test_a_frozen_loop_has_forward_derivatives():
    def loss(t, x, up, down):
        return jnp.sin(t) * _stack(x, up, down)

    def mixed(function):
        slope = jax.grad(function)
        return jax.jit(lambda: jax.jvp(lambda x: slope(1.0, x, UP, DOWN), (X,), (X,))[1])()

    assert_close(mixed(jc.checkpoint(loss, EXACT)), mixed(loss), 1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, slow(jnp.float16)])
def test_half_precision(dtype):
    args = [a.astype(dtype) for a in (X, UP, DOWN)]
    expected = _gradients(_stack, *args)
    got = _gradients(jc.checkpoint(_stack, jc.Quantize(bits=8)), *args)
    assert jax.tree.map(lambda a: a.dtype, got) == jax.tree.map(lambda a: a.dtype, expected)
    wide = [jax.tree.map(lambda a: a.astype(jnp.float32), tree) for tree in (got, expected)]
    assert distance(*wide) < 0.05


def test_second_derivatives_are_refused():
    function = jc.checkpoint(lambda x: _stack(x, UP, DOWN), CODEC)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        jax.hessian(lambda t: function(t * X))(1.0)


def test_a_loop_without_a_gradient_is_left_alone():
    def run(x, up):
        order = lax.scan(lambda i, _: (i + 1, i), 0, None, length=4)[1]
        frozen = lax.scan(lambda c, w: (jnp.sin(c @ w @ w.T), None), jnp.ones((4, 64)), up)[0]
        return (jnp.sin(x) ** 2).sum() * order.sum() + lax.stop_gradient(frozen).sum()

    plan = jc.checkpoint(run, CODEC).plan(X, UP)
    assert not any("iterations" in v.note for v in plan.values)
    got, expected = (jax.jit(jax.grad(f))(X, UP) for f in (jc.checkpoint(run, CODEC), run))
    assert_close(got, expected, 1e-5)


def test_masks_of_a_recomputed_loop_stay_in_the_loop():
    length, queries = 64, 4

    @jax.checkpoint
    def attend(x):
        @jax.checkpoint
        def some(start):
            scores = lax.dynamic_slice_in_dim(x, start, queries) @ x.T
            after = start + jnp.arange(queries)[:, None] < jnp.arange(length)[None]
            return jax.nn.softmax(jnp.where(after, -1e9, scores)) @ x

        return lax.map(some, jnp.arange(0, length, queries)).reshape(x.shape)

    def loss(x):
        return jc.checkpoint(lambda x: attend(jnp.sin(x)), jc.Quantize(4))(x).sum()

    traced = jax.make_jaxpr(jax.grad(loss))(jnp.ones((length, 4)))
    outside = [v.aval.size for equation in traced.eqns for v in equation.outvars]
    assert max(outside) < length * length
