"""Regions under `jax.checkpoint`: opened where codes take no more bytes, and kept otherwise."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxcomp as jc
from jaxcomp.policies import Policy, Rule
from tests.helpers import assert_same_bits, distance, normal, slow

X = normal((512, 32))
WEIGHTS = 0.1 * normal((3, 32, 64), seed=1), 0.1 * normal((3, 64, 32), seed=2)
CODEC = jc.Quantize(bits=4)
OPEN, KEEP = Rule("open", op="checkpoint"), Rule("keep", op="checkpoint")


def _block(x, up, down):
    return x + checkpoint_name(jax.nn.gelu(x @ up), "hidden") @ down


def _blocks(x, up, down, around=lambda f: f):
    for pair in zip(up, down, strict=True):
        x = around(_block)(x, *pair)
    return x


def _scanned(x, up, down, around=lambda f: f):
    return lax.scan(lambda x, w: (around(_block)(x, *w), None), x, (up, down))[0]


def _nested(x, up, down, around=lambda f: f):
    return around(functools.partial(_blocks, around=around))(x, up, down)


def _in_a_branch(x, up, down, around=lambda f: f):
    return lax.cond(x[0, 0] < 9, around(_blocks), lambda x, *_: x, x, up, down)


def _with_literals(x, up, down, around=lambda f: f):
    """The region, and a jitted function and a loop in it, are called with numbers."""

    def block(x, up, down, scale):
        def chunk(total, w):
            return total + jax.jit(lambda x, scale: scale * x)(jax.nn.gelu(x @ w), scale), None

        total, _ = lax.scan(chunk, jnp.zeros((x.shape[0], up.shape[1])), jnp.stack([up, up]))
        return x + total @ down

    return around(block)(x, up[0], down[0], 0.5)


AROUND = [
    jax.checkpoint,
    functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable),
    functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("hidden")
    ),
    eqx.filter_checkpoint,
]


def _gradients(function, policy, weights=WEIGHTS):
    def loss(*arguments):
        return jnp.mean(jnp.sin(jc.checkpoint(function, policy)(*arguments)) ** 2)

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(X, *weights)


def _notes(function, policy=CODEC, weights=WEIGHTS):
    notes = jc.plan(jc.checkpoint(function, policy), X, *weights).notes
    return [note for note in notes if "jax.checkpoint" in note]


@pytest.mark.parametrize(
    ("function", "around"),
    [
        *((function, jax.checkpoint) for function in (_nested, _with_literals)),
        *((_scanned, around) for around in AROUND),
        *(slow(function, jax.checkpoint) for function in (_blocks, _in_a_branch)),
        *(slow(_with_literals, around) for around in AROUND[1:]),
    ],
)
def test_an_open_region_is_as_plain_code(function, around):
    region = functools.partial(function, around=around)
    found, plain = _gradients(region, Policy((OPEN, Rule(CODEC)))), _gradients(function, CODEC)
    assert_same_bits(found, plain)


@pytest.mark.parametrize("function", [slow(_blocks), slow(_scanned), _nested, _with_literals])
def test_the_policy_opens_where_codes_take_no_more_bytes(function):
    region = functools.partial(function, around=jax.checkpoint)
    assert all(" open: " in note for note in _notes(region))
    assert_same_bits(_gradients(region, CODEC), _gradients(function, CODEC))
    assert_same_bits(_gradients(region, CODEC)[0], _gradients(function, jc.Exact())[0])


def test_regions_stay_closed_where_codes_take_more_bytes():
    deep = functools.partial(_scanned, around=jax.checkpoint)
    weights = 0.1 * normal((60, 32, 256), seed=1), 0.01 * normal((60, 256, 32), seed=2)
    (note,) = _notes(deep, CODEC, weights)
    assert "this block is rematerialised by jax.checkpoint, 60 times" in note
    with pytest.warns(UserWarning, match=r"test_regions.*rematerialised.*Rule\('open'"):
        closed = _gradients(deep, CODEC, weights)
    assert_same_bits(_gradients(deep, Policy((KEEP, Rule(CODEC))), weights), closed)
    assert distance(closed[1], _gradients(deep, jc.Exact(), weights)[1]) < 1e-5


@pytest.mark.parametrize("function", [slow(_blocks), _scanned])
def test_a_codec_is_for_the_inputs_of_regions(function):
    region = functools.partial(function, around=jax.checkpoint)
    policy = Policy((Rule(jc.Quantize(bits=8), op="checkpoint"), Rule(CODEC)))
    note, *_ = _notes(region, policy)
    assert "evaluated again from inputs saved by Quantize(bits=8" in note and "biased" in note
    saved = jc.plan(jc.checkpoint(region, policy), X, *WEIGHTS).saved_bytes
    assert 0 < saved < 3 * 1.3 * X.size  # one byte an element, and ranges
    (value, found), (stock, exact) = _gradients(region, policy), _gradients(function, jc.Exact())
    assert_same_bits(value, stock)
    assert 1e-4 < distance(found, exact) < 0.05


def test_rules_choose_regions_by_path():
    class Net(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.first, self.second = (nnx.Linear(32, 32, rngs=rngs) for _ in range(2))

        def __call__(self, x):
            for layer in (self.first, self.second):
                x = jnp.tanh(nnx.remat(lambda layer, x: jnp.sin(layer(x)))(layer, x))
            return x

    rules = Rule("keep", op="checkpoint", path="first"), Rule("open", op="checkpoint", path="sec.*")
    notes = jc.plan(jc.compress(Net(), Policy((*rules, Rule(CODEC)))), X).notes
    assert [note.split(",")[0].split(":")[0] for note in notes if "checkpoint" in note] == [
        "first",
        "second",
    ]
    unknown = Policy((Rule("keep", op="checkpoint", path="third"), Rule(CODEC)))
    with pytest.raises(ValueError, match=r"matches nothing.*first, second"):
        _ = jc.plan(jc.compress(Net(), unknown), X)


def test_attentions_stay_closed():
    @jax.checkpoint
    def attend(q, k, v):
        scores = jnp.einsum("qhd,khd->hqk", q, k)
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), v)

    def layer(x, up, down):
        q, k, v = jnp.split((x @ up[0]).reshape(512, 2, 32), [8, 16], -1)
        return attend(q, k, v).reshape(512, -1) @ down[0, :32]

    (note,) = _notes(layer)
    assert "rematerialised" in note


OFFLOADED = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["hidden"],
    offload_src="device",
    offload_dst="pinned_host",
)


def test_what_an_author_offloads_does_not_wait_on_the_device():
    with_offload, without = (
        _notes(functools.partial(_scanned, around=functools.partial(jax.checkpoint, policy=policy)))
        for policy in (OFFLOADED, jax.checkpoint_policies.nothing_saveable)
    )
    assert [n.split("instead of")[1].split(" and")[0] for n in with_offload] == [
        n.split("instead of")[1].split(" and")[0] for n in without
    ]


@pytest.mark.parametrize(
    "policy", [jc.Exact(), jax.checkpoint_policies.dots_saveable, Policy((KEEP, Rule(CODEC)))]
)
def test_what_an_author_offloads_stays_so_in_a_kept_region(policy):
    region = functools.partial(_scanned, around=functools.partial(jax.checkpoint, policy=OFFLOADED))
    assert distance(_gradients(region, policy)[1], _gradients(_scanned, jc.Exact())[1]) < 1e-5
    if policy is not jax.checkpoint_policies.dots_saveable:  # which saves the value itself
        plan = jc.plan(jc.checkpoint(region, policy), X, *WEIGHTS)
        decisions = {value.shape: value.decision for value in plan.values}
        assert decisions == {(3, 512, 64): "offload", (3, 512, 32): "exact"}
        assert plan.saved_bytes == plan.exact_bytes == 3 * X.nbytes


def test_integers_that_follow_from_what_is_differentiated():
    """A region takes and returns a number of steps and the largest feature."""

    def function(x, up, down, around=lambda f: f):
        def block(x, up, down, steps):
            y = _block(x, up, down)
            return {"y": y, "steps": steps + y.argmax(-1), "none": None}

        steps = jnp.zeros(x.shape[0], int)
        for pair in zip(up, down, strict=True):
            result = around(block)(x, *pair, steps)
            x, steps = result["y"], result["steps"]
        return x * steps[:, None]

    region = functools.partial(function, around=jax.checkpoint)
    for policy in (CODEC, Policy((OPEN, Rule(CODEC)))):
        assert_same_bits(_gradients(region, policy), _gradients(function, CODEC))


def test_linen_remat_is_opened():
    class Block(linen.Module):
        @linen.compact
        def __call__(self, x):
            return x + linen.Dense(32)(jnp.tanh(linen.Dense(64)(x)))

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.remat(Block)()(linen.remat(Block)()(x))

    parameters = Net().init(jax.random.key(0), X)
    (note, *_) = jc.plan(jc.checkpoint(Net().apply, CODEC), parameters, X).notes
    assert "Block" in note and "is open" in note


def test_frozen_regions_and_policies_without_codecs_are_left_alone():
    region = functools.partial(_blocks, around=jax.checkpoint)
    for policy in (jc.Exact(), jax.checkpoint_policies.nothing_saveable):
        assert not _notes(region, policy)

    def frozen(x, *weights):
        return x + region(*map(lax.stop_gradient, (x, *weights)))

    assert not _notes(frozen)
    assert distance(_gradients(frozen, CODEC)[1], _gradients(frozen, jc.Exact())[1]) < 1e-5


def test_a_rule_for_what_is_only_in_kept_regions():
    """Rules for some products are seldom worth opening regions, of which all is then saved."""
    deep = functools.partial(_scanned, around=jax.checkpoint)
    weights = 0.1 * normal((60, 32, 256), seed=1), 0.01 * normal((60, 256, 32), seed=2)
    with pytest.raises(ValueError, match=r"in regions under jax.checkpoint.*Rule\('open'"):
        jc.plan(jc.checkpoint(deep, jc.recipes.pruning()), X, *weights)
    opened = jc.checkpoint(deep, Policy((OPEN,)) + jc.recipes.pruning())
    assert any(value.op == "dot" for value in jc.plan(opened, X, *weights).values)
