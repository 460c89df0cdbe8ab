"""Regions under `jax.checkpoint` whose backward pass evaluates attentions in slices."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree

import jaxcomp as jc
from experiments.zoo.scenarios import pair_stack
from jaxcomp.memory import analyze
from jaxcomp.memory._flops import flops
from jaxcomp.models._lm import attend
from jaxcomp.policies import Policy, Rule
from jaxcomp.transform._nested.kept import Kept
from jaxcomp.transform._pieces.limits import limits_of
from tests.helpers import assert_same_bits, distance, kept, normal, slow

N, CHANNELS, BLOCKS = 20, 8, 2
WHOLE_FORWARD = {"slice_nbytes": 2**12, "tpu_slice_nbytes": 2**12, "ratio": 1}
SLICED = WHOLE_FORWARD | {"forward_nbytes": 0}


def _weights(dtype=jnp.float32):
    """The weights of blocks, none of which is zero."""
    params = pair_stack.init(jax.random.key(0), BLOCKS, CHANNELS, dtype=dtype)
    return jax.tree.map(lambda w: w + 0.1 * normal(w.shape, dtype, seed=w.ndim), params["blocks"])


WEIGHTS, PAIR = _weights(), normal((N, N, CHANNELS), seed=1)


def _once(weights, pair, around=jax.checkpoint):
    return around(pair_stack.block)(jax.tree.map(lambda w: w[0], weights), pair)


def _scanned(weights, pair, around=jax.checkpoint):
    return lax.scan(lambda pair, w: (around(pair_stack.block)(w, pair), None), pair, weights)[0]


def _nested(weights, pair, around=jax.checkpoint):
    return around(functools.partial(_scanned, around=around))(weights, pair)


def _whole_loop(weights, pair, around=jax.checkpoint):
    return around(functools.partial(_scanned, around=lambda f: f))(weights, pair)


def _mapped(weights, pair, around=jax.checkpoint):
    one = functools.partial(_once, around=around)
    return jax.vmap(one, (None, 0))(weights, jnp.stack([pair, 2 * pair]))


def _in_a_branch(weights, pair, around=jax.checkpoint):
    first = functools.partial(_once, around=around)
    return lax.cond(pair[0, 0, 0] < 9, first, lambda _, pair: pair, weights, pair)


def _inner(weights, pair, around=jax.checkpoint):
    """The author's attention is under `jax.checkpoint`, too."""

    def block(weights, pair):
        starting = functools.partial(pair_stack.triangle_attention, starting=True)
        return pair + around(starting)(weights["starting"], pair)

    return around(block)(jax.tree.map(lambda w: w[0], weights), pair)


FUNCTIONS = [_once, _scanned, _nested, _whole_loop, _mapped, _in_a_branch, _inner]
WRT = [0, 1, (0, 1)]


@pytest.fixture(autouse=True)
def as_others_write_it():
    """Biases are added to arrays of more axes."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def slices(monkeypatch):
    """Counts the regions that are evaluated in slices."""
    count = []

    def counted(method):
        def call(*arguments):
            count.append(1)
            return method(*arguments)

        return call

    for name in ("linear", "backward"):
        monkeypatch.setattr(Kept, name, counted(getattr(Kept, name)))
    return count


def _value_and_gradient(function, wrt, weights=WEIGHTS, pair=PAIR):
    def loss(weights, pair):
        return jnp.sum(jnp.sin(function(weights, pair).astype(jnp.float32)))

    value, gradient = jax.jit(jax.value_and_grad(loss, wrt))(weights, pair)
    return value, ravel_pytree(gradient)[0]


@pytest.mark.parametrize(
    ("function", "wrt"),
    kept([(f, wrt) for f in FUNCTIONS for wrt in WRT], [(_scanned, (0, 1)), (_mapped, 1)]),
)
def test_the_gradient_is_that_of_jax_checkpoint(function, wrt, slices):
    stock_value, stock = _value_and_gradient(function, wrt)
    with limits_of(**SLICED):
        value, found = _value_and_gradient(jc.checkpoint(function, "exact"), wrt)
        assert slices
        assert distance(found, stock) < 1e-5 and jnp.allclose(value, stock_value, 1e-6)
    with limits_of(**WHOLE_FORWARD):
        value, found = _value_and_gradient(jc.checkpoint(function, "exact"), wrt)
        assert_same_bits(value, stock_value)
        assert distance(found, stock) < 1e-5


@pytest.mark.parametrize("rest", [jc.recipes.automatic(), slow(Policy(()))])
def test_a_rule_that_keeps_regions(rest, slices):
    policy = Policy((Rule("keep", op="checkpoint"),)) + rest
    _, stock = _value_and_gradient(_scanned, 1)
    with limits_of(**SLICED):
        _, found = _value_and_gradient(jc.checkpoint(_scanned, policy), 1)
        notes = jc.plan(jc.checkpoint(_scanned, policy), WEIGHTS, PAIR).notes
    assert slices and distance(found, stock) < 1e-5
    assert any("while one is evaluated again, its attentions in slices" in note for note in notes)


def test_a_bounded_region_is_evaluated_in_slices(slices):
    _, stock = _value_and_gradient(_scanned, (0, 1))
    policy = Policy((Rule(jc.Quantize(bits=8), op="checkpoint"),))
    with limits_of(**SLICED):
        _, found = _value_and_gradient(jc.checkpoint(_scanned, policy), (0, 1))
        plan = jc.plan(jc.checkpoint(_scanned, policy), WEIGHTS, PAIR)
    assert slices and 1e-5 < distance(found, stock) < 0.05
    assert plan.saved_bytes < 1.5 * BLOCKS * PAIR.size  # a byte an element, and ranges


@pytest.mark.parametrize("function", [_once, slow(_scanned)])
def test_forward_mode_and_second_derivatives(function, slices):
    move = normal(PAIR.shape, seed=2)

    def loss(function, pair):
        return jnp.sum(jnp.sin(function(WEIGHTS, pair)))

    def moved(function):
        return jax.jit(lambda x, v: jax.jvp(functools.partial(loss, function), (x,), (v,)))(
            PAIR, move
        )

    def twice(function):
        slope = jax.grad(functools.partial(loss, function))
        forward_over_reverse = jax.jvp(slope, (PAIR,), (move,))[1]
        return forward_over_reverse, jax.grad(lambda x: jnp.vdot(slope(x), move))(PAIR)

    stock = moved(function), jax.jit(lambda: twice(function))()
    with limits_of(**SLICED):
        ours = jc.checkpoint(function, "exact")
        found = moved(ours), jax.jit(lambda: twice(ours))()
    assert slices
    assert distance(ravel_pytree(found)[0], ravel_pytree(stock)[0]) < 1e-4


SHAPE = 2, 64, 4, 4  # of queries, keys and values
KERNELS = {name: 0.3 * normal((16, *SHAPE[2:]), seed=i) for i, name in enumerate("qkv")}
KERNELS["o"] = 0.3 * normal((*SHAPE[2:], 16), seed=3)
X = normal((*SHAPE[:2], 16), seed=4)


def _attend(weights, x, mask=None, bias=0.0):
    """A block of an attention with a mask or a bias; heads may be divided over devices."""
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, weights[name]) for name in "qkv")
    scores = jnp.einsum("bthk,bshk->bhts", q, k) + bias
    if mask is not None:
        scores = jnp.where(mask, scores, -1e9)
    mixed = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v)
    return jnp.einsum("bthk,hkd->btd", mixed, weights["o"])


def _of_block(block, *rest):
    """The gradient of the block's weights and of the rest."""

    def gradient(function):
        def loss(*arguments):
            return jnp.sum(jnp.sin(function(*arguments)))

        inexact = [i for i, a in enumerate(rest) if jnp.issubdtype(a.dtype, jnp.inexact)]
        wrt = (0, *(2 + i for i in inexact))
        return ravel_pytree(jax.jit(jax.grad(loss, wrt))(KERNELS, X, *rest))[0]

    stock = gradient(jax.checkpoint(block))
    with limits_of(**SLICED):
        return distance(gradient(jc.checkpoint(jax.checkpoint(block), "exact")), stock)


@pytest.mark.parametrize(
    "shape", [(SHAPE[0], 1, 1, SHAPE[1]), slow((1, 1, SHAPE[1], SHAPE[1]))], ids=["padding", "all"]
)
def test_masks_that_are_arguments(shape, slices):
    assert _of_block(_attend, normal(shape, seed=5) > -1) < 1e-5
    assert slices


def test_an_attention_whose_gradients_have_no_slices_is_left_to_jax(slices):
    """The gradient of a bias is as large as the scores."""

    def biased(weights, x, bias):
        return _attend(weights, x, bias=bias)

    assert _of_block(biased, normal((1, SHAPE[2], SHAPE[1], SHAPE[1]), seed=5)) == 0
    assert not slices


def test_heads_on_several_devices(slices):
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {name: jax.P(None, "heads") for name in "qkv"} | {"o": jax.P("heads")}

    def block(weights, x):
        return lax.psum(_attend(weights, x), "heads")

    def over_devices(function):
        return jax.shard_map(function, mesh=mesh, in_specs=(specs, jax.P()), out_specs=jax.P())

    def gradient(function):
        def loss(weights, x):
            return jnp.sum(jnp.sin(over_devices(function)(weights, x)))

        return ravel_pytree(jax.jit(jax.grad(loss, (0, 1)))(KERNELS, X))[0]

    stock = gradient(jax.checkpoint(block))
    with limits_of(**SLICED):
        found = gradient(jc.checkpoint(jax.checkpoint(block), "exact"))
    assert slices and distance(found, stock) < 1e-5


def _of_author(**options):
    return functools.partial(_once, around=functools.partial(jax.checkpoint, **options))


def _with_an_effect(weights, pair):
    def block(weights, pair):
        jax.debug.callback(lambda x: None, pair[0, 0, 0])
        return pair_stack.block(weights, pair)

    return jax.checkpoint(block)(jax.tree.map(lambda w: w[0], weights), pair)


def _in_chunks(weights, pair):
    """An attention whose queries take turns, each under a `jax.checkpoint` of its own."""
    q = pair.reshape(*pair.shape[:2], 4, -1)
    return jax.checkpoint(attend, static_argnums=(3, 4))(q, 2 * q, jnp.sin(q), True, N // 2)


@pytest.mark.parametrize(
    ("function", "limits"),
    [
        (_once, {}),
        (_in_chunks, SLICED),
        (_with_an_effect, SLICED),
        (_of_author(policy=jax.checkpoint_policies.dots_saveable), SLICED),
    ],
)
def test_other_regions_are_left_to_jax(function, limits, slices):
    stock = _value_and_gradient(function, 1)
    with limits_of(**limits):
        found = _value_and_gradient(jc.checkpoint(function, "exact"), 1)
    assert not slices
    assert_same_bits(found[0], stock[0])
    assert distance(found[1], stock[1]) < 1e-5


def test_a_policy_that_saves_nothing_is_as_none(slices):
    function = _of_author(policy=jax.checkpoint_policies.nothing_saveable)
    with limits_of(**SLICED):
        _value_and_gradient(jc.checkpoint(function, "exact"), 1)
    assert slices


@pytest.mark.aot
def test_h100_needs_half_of_the_bytes_for_a_tenth_of_the_flops(capsys):
    pytest.importorskip("jax_cuda13_plugin")

    def gradient(function):
        return jax.grad(lambda pair, weights: jnp.sum(function(weights, pair).astype(jnp.float32)))

    params = jax.eval_shape(lambda: pair_stack.init(jax.random.key(0), 3, dtype=jnp.bfloat16))
    arguments = jax.ShapeDtypeStruct((384, 384, 128), jnp.bfloat16), params["blocks"]
    stock, ours = gradient(_scanned), gradient(jc.checkpoint(_scanned, "exact"))
    before, after = (analyze(f, *arguments, target="h100").temp_bytes for f in (stock, ours))
    work = flops(ours, *arguments) / flops(stock, *arguments)
    with capsys.disabled():
        print(f"\nh100, pairs of 384: {before >> 20} -> {after >> 20} MiB, FLOPs {work:.3f}")
    assert after < 0.5 * before and work < 1.1
