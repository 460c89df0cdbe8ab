"""`checkpoint` of functions with `cond` and `switch`, whose branches store by the policy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jaxcomp as jc
from jaxcomp import memory
from jaxcomp.codecs._codec import array_nbytes
from jaxcomp.transform._nested import nested as module
from tests.helpers import (
    assert_close,
    assert_same_bits,
    assert_scattered_by_chance,
    distance,
    kept,
    normal,
    only,
    slow,
    stored_shapes,
)

X = normal((32, 64))
UP, DOWN = 0.2 * normal((64, 96), seed=1), 0.2 * normal((96, 64), seed=2)
EXACT, CODEC = jc.Exact(), jc.Quantize(bits=4)


def _mlp(x, up, down):
    return jax.nn.gelu(x @ up) @ down


def _hidden(x):
    """What is no argument, so that something of it has to wait."""
    return jnp.tanh(x @ x.T @ x / 64)


def _skipped(number, x, up, down):
    """Stochastic depth, as its users write it."""
    h = _hidden(x)
    h = lax.cond(number > 0, lambda h: h + _mlp(h, up, down), lambda h: h, h)
    return jnp.mean(jnp.sin(h))


def _switched(number, x, up, down):
    """Branches of other residuals each, one of which is constant; an integer goes through."""
    branches = [
        lambda h, i: (jnp.sin(h) * jnp.tanh(h), i + 1),
        lambda h, i: (_mlp(h, up, down), i),
        lambda h, i: (jnp.ones_like(h), i),
    ]
    h, count = lax.switch(number, branches, _hidden(x), 2)
    return jnp.mean(h**2) * count


def _in_a_loop(number, x, up, down):
    def body(h, i):
        return lax.cond(i == number, lambda h: h, lambda h: h + _mlp(h, up, down), h), None

    return jnp.mean(lax.scan(body, _hidden(x), jnp.arange(3))[0] ** 2)


def _around_a_loop(number, x, up, down):
    def stack(h):
        return lax.scan(lambda h, t: (h + t * _mlp(h, up, down), None), h, jnp.arange(3.0))[0]

    return jnp.mean(lax.cond(number > 0, stack, jnp.sin, _hidden(x)) ** 2)


FUNCTIONS = [_skipped, _switched, _in_a_loop, _around_a_loop]


def _gradients(function, number):
    return jax.jit(jax.grad(function, (1, 2, 3)))(number, X, UP, DOWN)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("function", kept(FUNCTIONS, (_switched, _around_a_loop)))
def test_gradients(function, number):
    expected = _gradients(function, number)
    exact, coded = jc.checkpoint(function, EXACT), jc.checkpoint(function, CODEC)
    args = number, X, UP, DOWN
    assert_same_bits(jax.jit(coded)(*args), jax.jit(function)(*args))
    assert distance(_gradients(exact, number), expected) < 1e-5
    assert 1e-4 < distance(_gradients(coded, number), expected) < 0.3


@pytest.mark.parametrize("function", kept(FUNCTIONS, (_switched, _in_a_loop)))
def test_the_plan_has_the_bytes_that_wait(function):
    function = jc.checkpoint(functools.partial(function, jnp.int32(1)), CODEC)
    plan = function.plan(X, UP, DOWN)
    arguments = {(a.shape, a.dtype.name) for a in (X, UP, DOWN)}
    waiting = [s for s in stored_shapes(function, X, UP, DOWN) if s not in arguments]
    of_numbers = sum(array_nbytes(*s) for s in waiting if np.prod(s[0]) <= 3)
    most = sum(array_nbytes(*s) for s in waiting)
    assert most - of_numbers <= plan.saved_bytes <= most
    assert plan.saved_bytes < 0.2 * plan.exact_bytes


def test_each_branch_is_planned():
    values = jc.checkpoint(_switched, CODEC).plan(1, X, UP, DOWN).values
    inside = {
        (v.note.split(";")[0], v.op or v.role, v.shape): v
        for v in values
        if v.note.startswith("branches")
    }
    assert set(inside) == {
        ("branches[0]", "derivative", (32, 64)),
        ("branches[1]", "input", (32, 64)),
        ("branches[1]", "activation", (32 * 96,)),
    }
    unit = inside["branches[1]", "activation", (32 * 96,)]
    assert unit.decision == str(CODEC)
    assert unit.saved_bytes == CODEC.nbytes((32, 96), jnp.bfloat16) + 4 * (32 + 96)
    assert unit.source.startswith("test_branches.py:")


def test_an_operand_that_is_kept_exactly_is_kept_once():
    def block(flag, x, up, down):
        h = _hidden(x)
        return jnp.sin(h) @ up @ down + lax.cond(flag, lambda h: _mlp(h, up, down), jnp.sin, h)

    policy = only(CODEC, roles=("derivative",))
    plan = jc.checkpoint(block, policy).plan(True, X, UP, DOWN)
    exact = [v for v in plan.values if v.decision == "exact" and v.shape == X.shape]
    assert [v.note.startswith("branches") for v in exact] == [False]
    waiting = stored_shapes(lambda x: jc.checkpoint(block, policy)(True, x, UP, DOWN), X)
    assert waiting.count((X.shape, "float32")) == 1


def test_branches_share_memory():
    """Three branches need no more than one; exactly kept, no more than in JAX."""

    def many(number, x, w):
        def branch(i):
            return lambda h: h + jnp.sin(h @ w[i]) @ w[i].T

        return jnp.sum(lax.switch(number, [branch(i) for i in range(3)], _hidden(x)) ** 2)

    w = 0.1 * normal((3, 64, 64), seed=3)

    def kept(function):
        waiting = stored_shapes(functools.partial(function, jnp.int32(1)), X, w)
        return sum(array_nbytes(*s) for s in waiting if s[0] not in (X.shape, w.shape, (64, 64)))

    for policy in (EXACT, CODEC):
        coded = jc.checkpoint(many, policy)
        got, expected = (jax.jit(jax.grad(f, (1, 2)))(2, X, w) for f in (coded, many))
        assert distance(got, expected) < (1e-5 if policy == EXACT else 0.3)
        values = coded.plan(1, X, w).values
        first = [v for v in values if v.note.startswith("branches[0]")]
        assert sum(v.saved_bytes for v in values if v.note.startswith("branches")) == sum(
            v.saved_bytes for v in first
        )
    assert kept(jc.checkpoint(many, EXACT)) <= kept(many)


@pytest.mark.parametrize("codec", [slow(jc.Offload(CODEC)), jc.Offload(EXACT)])
def test_what_a_branch_saves_waits_in_the_hosts_memory(codec):
    inner = CODEC if codec == jc.Offload(CODEC) else EXACT
    got, expected = (_gradients(jc.checkpoint(_skipped, c), 1) for c in (codec, inner))
    assert distance(got, expected) < 1e-6


def test_each_nested_branch_is_scheduled_once(monkeypatch):
    count = []
    schedule = module.schedule
    monkeypatch.setattr(module, "schedule", lambda *args: count.append(1) or schedule(*args))

    def nested(depth, number, h):
        if not depth:
            return jnp.sin(h @ UP) @ DOWN
        step = functools.partial(nested, depth - 1, number)
        return lax.cond(number > depth, lambda h: jnp.sin(h) * step(h), jnp.sin, jnp.tanh(h))

    policy = only(CODEC, roles=("derivative",))
    jc.checkpoint(lambda number, x: nested(3, number, _hidden(x)), policy).plan(1, X)
    assert len(count) == 1 + 2 * 3


def test_unbiased_over_seeds():
    def draw(seed):
        return _gradients(jc.checkpoint(_skipped, jc.Quantize(bits=2), seed=seed), 1)

    draws = jax.jit(lambda: lax.map(draw, jnp.arange(64)))()
    assert_scattered_by_chance(draws, _gradients(_skipped, 1))


@pytest.mark.parametrize("policy", [slow(EXACT), jc.Quantize(bits=8)])
def test_branches_of_examples_and_shards(policy):
    """A branch that each example of `vmap`, or each shard, chooses; one has a collective."""
    numbers = jnp.arange(8) % 2
    examples = jnp.stack([X + number for number in range(8)])

    def each(function):
        rows = jax.vmap(functools.partial(function, up=UP, down=DOWN))
        return jax.jit(jax.grad(lambda x: rows(numbers, x).sum()))(examples)

    limit = 1e-5 if policy == EXACT else 0.02
    assert distance(each(jc.checkpoint(_switched, policy)), each(_switched)) < limit
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))

    def shards(function, check):
        def local(x, up, down):
            def mixed(h):
                return _mlp(h + lax.pmean(h, "batch"), up, down)

            h = lax.cond(lax.psum(x[0, 0], "batch") < 999, mixed, jnp.sin, _hidden(x))
            if not check:  # or JAX adds up the weights' gradients in the branch, and waits for all
                own = lax.axis_index("batch") > 4
                h = lax.cond(own, lambda h: _mlp(h, up, down), jnp.sin, h)
            return lax.psum(jnp.sum(h**2), "batch")

        specs = jax.P("batch"), jax.P(), jax.P()
        mapped = jax.shard_map(
            function(local), mesh=mesh, in_specs=specs, out_specs=jax.P(), check_vma=check
        )
        return jax.jit(jax.grad(mapped, (0, 1, 2)))(X, UP, DOWN)

    for check in (True, False):
        coded = shards(lambda f: jc.checkpoint(f, policy), check)
        assert distance(coded, shards(lambda f: f, check)) < limit


def test_random_keys_and_masks_in_a_branch():
    def block(key, x, up, down):
        def dropped(key, h):
            h = jnp.where(jax.random.bernoulli(key, 0.5, h.shape), jnp.tanh(h), 0)
            return h @ up @ down

        return jnp.sum(lax.cond(x[0, 0] < 9, dropped, lambda _, h: h, key, jnp.sin(x)) ** 2)

    def gradient(function):
        return jax.jit(jax.grad(function, 1))(jax.random.key(0), X, UP, DOWN)

    assert_close(gradient(jc.checkpoint(block, EXACT)), gradient(block), 1e-5)
    assert distance(gradient(jc.checkpoint(block, jc.Quantize(bits=8))), gradient(block)) < 0.02


@pytest.mark.parametrize("policy", [EXACT, CODEC])
def test_results_outside_of_jit_are_committed_to_no_device(policy):
    def branch(x):
        return lax.cond(x[0, 0] > 0, _hidden, jnp.sin, x)

    def loss(x):
        return jc.checkpoint(branch, policy)(x).sum()

    assert not any(a.committed for a in jax.value_and_grad(loss)(X))


def test_policies_are_asked_in_the_branches():
    few, many = (
        jc.checkpoint(_skipped, policy).plan(1, X, UP, DOWN)
        for policy in (
            jax.checkpoint_policies.nothing_saveable,
            jax.checkpoint_policies.dots_saveable,
        )
    )
    assert not any(v.note.startswith("branches") for v in few.values)
    assert (32, 96) in {v.shape for v in many.values if v.note.startswith("branches[1]")}
    with pytest.raises(ValueError, match=r"primitives: .*tanh.*; roles"):
        jc.checkpoint(_switched, only(CODEC, names=("absent",))).plan(1, X, UP, DOWN)


def test_effects_and_platforms_are_left_alone():
    seen = []

    def loss(x, up, down):
        def told(h):
            jax.debug.callback(lambda: seen.append(1))
            return _mlp(h, up, down)

        h = lax.cond(x[0, 0] < 9, told, jnp.sin, jnp.tanh(x))
        h = lax.platform_dependent(h, cpu=jnp.sin, default=jnp.cos)
        return jnp.mean(h**2)

    got, expected = (
        jax.jit(jax.grad(f, (0, 1, 2)))(X, UP, DOWN) for f in (jc.checkpoint(loss, EXACT), loss)
    )
    assert_close(got, expected, 1e-5)
    jax.effects_barrier()
    assert len(seen) == 2
    plan = jc.checkpoint(loss, CODEC).plan(X, UP, DOWN)
    assert not any(v.note.startswith("branches") for v in plan.values)


@pytest.mark.slow
def test_a_step_keeps_codes_of_what_a_branch_computes():
    """Five blocks with stochastic depth: what XLA keeps of each, compiled for this CPU."""
    x, up, down = normal((512, 64)), UP, DOWN

    def loss(flags, x, up, down):
        for flag in flags:
            x = lax.cond(flag, lambda x: x + _mlp(x, up, down), lambda x: x, x)
        return jnp.mean(x**2)

    def needs(function):
        flags = jnp.ones(5, bool)
        step = jax.jit(jax.grad(function, (2, 3)))
        return memory.analyze(step, flags, x, up, down, target="cpu").temp_bytes

    plain, coded = needs(loss), needs(jc.checkpoint(loss, CODEC))
    print(f"{plain:,} bytes plain, {coded:,} with codes")
    assert coded < plain / 2.5


class Layers(nnx.Module):
    """Layers that are skipped at random, as Flax's users write them."""

    def __init__(self, rngs):
        self.layers = nnx.List(nnx.Linear(64, 64, rngs=rngs) for _ in range(2))
        self.rngs = rngs

    def __call__(self, x):
        for layer in self.layers:
            flag = jax.random.bernoulli(self.rngs.drop(), 0.9)
            x = nnx.cond(flag, lambda layer, x: x + jax.nn.gelu(layer(x)), lambda _, x: x, layer, x)
        return x


def test_compress_sees_the_layers_in_a_branch():
    x = normal((512, 64))

    def loss(model):
        return jnp.mean(model(x) ** 2)

    def gradient(change):
        model = change(Layers(nnx.Rngs(0, drop=1)))
        return nnx.to_pure_dict(nnx.jit(nnx.grad(loss))(model))

    model = jc.compress(Layers(nnx.Rngs(0, drop=1)), CODEC)
    inside = [v for v in jc.plan(model, x).values if v.note.startswith("branches")]
    assert {v.role for v in inside} == {"input", "derivative"}
    coded = gradient(lambda model: jc.compress(model, CODEC))
    assert 1e-3 < distance(coded, gradient(lambda model: model)) < 0.2
