"""Regions under `jax.checkpoint` in others that are kept: these encode while they are evaluated."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxcomp as jc
from jaxcomp.memory import analyze
from jaxcomp.policies import Policy, Rule
from jaxcomp.transform._nested.kept import Kept
from tests.helpers import (
    as_float,
    assert_same_bits,
    assert_scattered_by_chance,
    distance,
    eight_devices,
    kept,
    normal,
    shard,
)

STEPS, ROWS = 24, 256
X = normal((ROWS, 16))
WEIGHTS = 0.1 * normal((3, 16, 64), seed=1), 0.02 * normal((3, 64, 16), seed=2)
CODEC = jc.Quantize(bits=4)


def _block(x, up, down):
    return x + jax.nn.gelu(x @ up) @ down


def _blocks(around, x, up, down):
    for pair in zip(up, down, strict=True):
        x = around(_block)(x, *pair)
    return x


def _scanned_blocks(around, x, up, down):
    return lax.scan(lambda x, w: (around(_block)(x, *w), None), x, (up, down))[0]


def _steps(blocks, around, x, up, down):
    """Many steps of the same blocks; each is under `jax.checkpoint`, and so is each block."""
    step = around(functools.partial(blocks, around))
    return lax.scan(lambda x, _: (step(x, up, down), None), x, None, length=STEPS)[0]


def _mapped(around, x, up, down):
    halves = x.reshape(2, -1, x.shape[1])
    step = functools.partial(_steps, _blocks, around)
    return jax.vmap(step, (0, None, None))(halves, up, down).reshape(x.shape)


def _in_a_branch(around, x, up, down):
    steps = functools.partial(_steps, _blocks, around)
    return lax.cond(x[0, 0] < 9, steps, lambda x, *_: x, x, up, down)


def _three_levels(around, x, up, down):
    return around(functools.partial(_steps, _blocks, around))(x, up, down)


FUNCTIONS = {
    "steps": functools.partial(_steps, _blocks),
    "steps of a scan": functools.partial(_steps, _scanned_blocks),
    "vmap": _mapped,
    "cond": _in_a_branch,
    "three levels": _three_levels,
}


@pytest.fixture
def encoded(monkeypatch):
    """Counts the schedules of kept regions that encode."""
    count = []
    choose = Kept.choose

    def counted(self, *arguments):
        choice = choose(self, *arguments)
        if choice.schedule.encodes or any(n.programs[0].schedule.encodes for n in choice.nested):
            count.append(1)
        return choice

    monkeypatch.setattr(Kept, "choose", counted)
    return count


def _gradients(function, policy=None, wrt=(0, 1, 2), x=X):
    def loss(seed, *arguments):
        ours = function if policy is None else jc.checkpoint(function, policy, seed=seed)
        return jnp.mean(jnp.sin(ours(*arguments)) ** 2)

    return jax.jit(jax.value_and_grad(loss, tuple(1 + i for i in wrt)))(jnp.uint32(0), x, *WEIGHTS)


CASES = [
    (name, around, wrt)
    for name in FUNCTIONS
    for around in (jax.checkpoint, eqx.filter_checkpoint)
    for wrt in ((0,), (1,), (0, 1, 2))
]
DEFAULT = [(name, jax.checkpoint, (0, 1, 2)) for name in FUNCTIONS]


@pytest.mark.parametrize(("name", "around", "wrt"), kept(CASES, DEFAULT))
def test_value_and_gradient(name, around, wrt, encoded):
    function = functools.partial(FUNCTIONS[name], around)
    value, gradient = _gradients(function, CODEC, wrt)
    plain_value, exact = _gradients(functools.partial(FUNCTIONS[name], lambda f: f), None, wrt)
    assert encoded
    assert_same_bits(value, plain_value)
    assert 1e-4 < distance(gradient, exact) < 0.2


def test_the_mean_gradient_is_exact():
    function = functools.partial(FUNCTIONS["steps"], jax.checkpoint)

    def loss(seed, *arguments):
        return jnp.mean(jnp.sin(jc.checkpoint(function, CODEC, seed=seed)(*arguments)) ** 2)

    draw = jax.jit(jax.grad(loss, (1, 2, 3)))
    draws = [draw(jnp.uint32(seed), X, *WEIGHTS) for seed in range(64)]
    _, exact = _gradients(function)
    assert_scattered_by_chance([jnp.stack(each) for each in zip(*draws, strict=True)], exact)


def test_it_needs_less_than_the_author_and_than_codes_of_all_steps():
    wide = jax.ShapeDtypeStruct((64 * ROWS, 16), jnp.float32)
    weights = [jax.ShapeDtypeStruct((16, 16, 16), jnp.float32)] * 2

    def nbytes(around, policy):
        function = functools.partial(FUNCTIONS["steps of a scan"], around)
        ours = jc.checkpoint(function, policy)
        gradient = jax.grad(lambda *args: jnp.mean(jnp.sin(ours(*args)) ** 2), (1, 2))
        return analyze(gradient, wide, *weights, target="h100").temp_bytes

    once = nbytes(jax.checkpoint, CODEC)
    author, everywhere = nbytes(jax.checkpoint, jc.Exact()), nbytes(lambda f: f, CODEC)
    print(f"{once=:,} {author=:,} {everywhere=:,}")
    assert once < 0.9 * author and once < 0.3 * everywhere


def test_the_plan_and_rules():
    function = functools.partial(FUNCTIONS["steps"], jax.checkpoint)
    notes = jc.plan(jc.checkpoint(function, CODEC), X, *WEIGHTS).notes
    (note,) = [note for note in notes if "jax.checkpoint" in note]
    assert f"rematerialised by jax.checkpoint, {STEPS} times" in note
    assert "while one is evaluated again, encoded" in note
    keep = Policy((Rule("keep", op="checkpoint"), Rule(CODEC)))
    assert_same_bits(_gradients(function, keep), _gradients(function, jc.Exact()))


def test_rows_on_several_devices():
    eight_devices()
    function = functools.partial(FUNCTIONS["steps"], jax.checkpoint)
    one, several = _gradients(function, CODEC), _gradients(function, CODEC, x=shard(X))
    assert distance(one[1], several[1]) < 1e-5


def test_forward_mode_is_an_error_that_says_so():
    function = jc.checkpoint(functools.partial(FUNCTIONS["steps"], jax.checkpoint), CODEC)
    with pytest.raises(TypeError, match="codes have reverse mode only"):
        jax.jvp(lambda x: function(x, *WEIGHTS), (X,), (X,))
    assert as_float(function(X, *WEIGHTS)).shape == X.shape
