"""Inner `jax.checkpoint`s and attentions, whose backward passes are evaluated in parts."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxcomp as jc
from jaxcomp import memory
from jaxcomp.transform._pieces.limits import limits_of
from tests.helpers import assert_close, collectives, normal, replicate, shard, slow
from tests.transform.attentions import (
    causal,
    gradient,
    loss_of,
    of_examples,
    over_devices,
    projected,
    rotated,
    stacked,
)

X, W = normal((8, 128, 64)), 0.2 * normal((4, 64, 64), seed=1)


@pytest.fixture(autouse=True)
def _small_parts():
    """Parts of small scores."""
    with limits_of(slice_nbytes=2**17, ratio=1):
        yield


@pytest.fixture(autouse=True)
def _as_users_add_biases():
    with jax.numpy_rank_promotion("allow"):
        yield


def _grouped(q, k, v):
    """Keys are sliced and rotated inside, as by rotary embeddings."""
    k = rotated(k)
    return jax.nn.dot_product_attention(q, k[:, :, :2], v[:, :, :2])


def _by_hand(q, k, v):
    """With a mask of each example, capped scores and no scores of the last key."""
    scores = 8 * jnp.tanh(jnp.einsum("bthd,bshd->bhts", q, k) / 8)
    seen = k[:, :, 0, 0][:, None, None] < 1.5
    scores = jnp.where(seen & (jnp.arange(128) < 127)[None, None, None], scores, -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)


def _loops(function, *args, platform="cpu"):
    traced = jax.jit(jax.grad(function, (0, 1))).trace(*args)
    return traced.lower(lowering_platforms=(platform,)).as_text().count("stablehlo.while")


def _has_loop(function, *args):
    return _loops(function, *args) > 0


@pytest.mark.parametrize(
    ("attend", "length"),
    [(causal, 8), (_grouped, 8), (_by_hand, 1), slow(_by_hand, 8), slow(causal, 1)],
)
def test_gradients(attend, length):
    """By examples, or by heads where there is one example."""
    loss = functools.partial(loss_of, attend)
    coded = jc.checkpoint(loss, jc.Exact())
    x = X[:length]
    assert _has_loop(coded, x, W)
    assert not _has_loop(loss, x, W)
    assert_close(gradient(coded, x, W), gradient(loss, x, W), 1e-5)


def test_a_loop_has_the_name_scope_of_its_attention():
    @functools.partial(jc.checkpoint, policy=jc.Exact())
    def loss(x, w):
        with jax.named_scope("layer"):
            return loss_of(causal, x, w)

    text = jax.jit(jax.grad(loss)).lower(X, W).compile().as_text()
    names = re.findall(r'op_name="([^"]*while/body[^"]*dot_general)"', text)
    assert names
    assert all("layer" in name for name in names)


def test_recognized_attentions_and_codes():
    def loss(x, w):
        q, k, v = ((jnp.tanh(x) @ w[i]).reshape(*x.shape[:2], 4, 16) for i in range(3))
        return jnp.sin(causal(q, k, v).reshape(x.shape) @ w[3]).sum()

    coded = jc.checkpoint(loss, "quantize:bits=8")
    assert _has_loop(coded, X, W)
    assert_close(gradient(coded, X, W), gradient(loss, X, W), 0.05)


def test_in_a_scan_and_vmap():
    loss = functools.partial(loss_of, causal)
    stack = stacked(loss)
    assert_close(gradient(jc.checkpoint(stack, jc.Exact()), X, W), gradient(stack, X, W), 1e-4)
    got, expected = (of_examples(f, X, W) for f in (jc.checkpoint(loss, jc.Exact()), loss))
    assert_close(got, expected, 1e-5)


_SEEDS = iter(range(99))
_FROZEN = [0.3 * normal(of, seed=next(_SEEDS)) for of in ((16, 96), (16, 96), (96, 16))]
_ADAPTERS = [
    (0.3 * normal((a, 2), seed=next(_SEEDS)), 0.3 * normal((2, b), seed=next(_SEEDS)), jnp.zeros(b))
    for a, b in ((16, 96), (96, 16))
]


def _network(x, adapters):
    """Frozen weights with adapters and biases."""
    gate, up, down = (weight.astype(x.dtype) for weight in _FROZEN)
    (a, b, bias), (c, d, last) = adapters
    y = jax.nn.silu(x @ gate) * (x @ up + (x @ a) @ b + bias)
    return y @ down + (y @ c) @ d + last


def _tuned(x, adapters):
    """Tokens of opposite signs almost cancel in the gradients."""
    y = jax.checkpoint(_network)(jnp.tanh(x), adapters).astype(jnp.float32)
    return jnp.sin(y + jnp.where(jnp.arange(x.shape[-2])[:, None] % 2, 0, jnp.pi)).sum()


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((512, 16), jnp.bfloat16),
        ((4, 128, 16), jnp.float32),
        ((1, 96, 16), jnp.float16),
        slow((1, 512, 16), jnp.float32),
        slow((4, 128, 16), jnp.float16),
        slow((96, 16), jnp.float32),
        slow((1, 96, 16), jnp.bfloat16),
    ],
)
@limits_of(slice_nbytes=2**14)
def test_frozen_feed_forward_networks_with_adapters(shape, dtype):
    """Parts of the tokens; the gradients of adapters and biases are sums over them, in float32.

    There may be as many tokens as features within the network.
    """
    coded = jc.checkpoint(_tuned, jc.Exact())
    wide = jax.tree.map(lambda a: a.astype(dtype).astype(jnp.float32), (normal(shape), _ADAPTERS))
    x, adapters = jax.tree.map(lambda a: a.astype(dtype), wide)
    assert _has_loop(coded, x, adapters)
    expected = gradient(_tuned, *wide)
    got, stock = (jax.tree.map(_error, gradient(f, x, adapters), expected) for f in (coded, _tuned))
    for ours, other in zip(*map(jax.tree.leaves, (got, stock)), strict=True):
        assert ours < 1.2 * other + 1e-6


def _error(got, expected):
    difference = got.astype(jnp.float32) - expected
    return float(jnp.linalg.norm(difference) / jnp.linalg.norm(expected))


def test_what_takes_the_whole_is_left_as_it_is():
    """Large gradients of weights, and of a bias that all examples share, are sums over examples."""

    def layers(x, w):
        return jnp.sin(jax.checkpoint(lambda x, w: jnp.tanh(x @ w[0]) @ w[1])(x, w)).sum()

    def biased(x, bias):
        def attend(x, bias):
            scores = jnp.einsum("btd,bsd->bts", x, x) + bias[None]
            return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), x)

        return jnp.sin(jax.checkpoint(attend)(x, bias)).sum()

    def biased_by_head(x, bias):
        """The axis of the heads of the bias is as long as that of the examples."""

        def attend(q, bias):
            return jax.nn.dot_product_attention(q, q, q, bias=bias[None])

        q = x.reshape(*x.shape[:2], 8, 8)
        return jnp.sin(jax.checkpoint(attend)(q, bias)).sum()

    def placed(x, w):
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return loss_of(lambda q, k, v: causal(lax.with_sharding_constraint(q, device), k, v), x, w)

    for function, other in (
        (layers, W),
        (biased, normal((128, 128))),
        (biased_by_head, normal((8, 128, 128))),
        (placed, W),
    ):
        coded = jc.checkpoint(function, jc.Exact())
        assert not _has_loop(coded, X, other)
        assert_close(gradient(coded, X, other), gradient(function, X, other), 1e-5)


@limits_of(slice_nbytes=2**13, tpu_slice_nbytes=2**13)
def test_parts_repeat_no_work():
    """Each part would run the loop, or multiply by the frozen matrix, for all of the array."""

    def in_a_loop(q, k, v):
        groups = q.reshape(8, 1, 16, 4, 16)
        return lax.map(jax.checkpoint(lambda q: _grouped(q, k, v)), groups).reshape(q.shape)

    def after_a_product(x, w):
        x = lax.stop_gradient(x)
        return jnp.sin(jax.checkpoint(lambda x, w: jnp.sin(x @ W[0] @ w).sum(-1))(x, w)).sum()

    for function, x, w in (
        (functools.partial(loss_of, in_a_loop), X[:1], W),
        (after_a_product, X[0, 1:], 0.1 * normal((64, 1024), seed=2)),
    ):
        coded = jc.checkpoint(function, jc.Exact())
        ours, stock = (_loops(f, x, w, platform="tpu") for f in (coded, function))
        assert ours == stock


def test_several_devices_keep_the_whole():
    coded = jc.checkpoint(functools.partial(loss_of, causal), jc.Exact())
    gradient = jax.grad(coded)
    args = shard(X), replicate(W)
    assert not collectives(gradient, *args)
    assert_close(jax.jit(gradient)(*args), jax.jit(gradient)(X, W), 1e-5)


@pytest.mark.parametrize("check", [True, slow(False)])
def test_shard_map(check):
    loss = functools.partial(loss_of, causal)
    coded = over_devices(jc.checkpoint(loss, jc.Exact()), check)
    assert _has_loop(coded, X, W)
    assert_close(gradient(coded, X, W), gradient(over_devices(loss, check), X, W), 1e-5)


def test_weights_that_all_devices_share():
    loss = projected(W[3])
    coded = over_devices(jc.checkpoint(loss, jc.Exact()), True)
    assert _has_loop(coded, X, W)
    assert_close(gradient(coded, X, W), gradient(over_devices(loss, True), X, W), 1e-5)


@pytest.mark.aot
def test_a_step_needs_less():
    x = normal((8, 256, 64))
    coded = jc.checkpoint(functools.partial(loss_of, causal), jc.Exact())

    def needs(part):
        with limits_of(slice_nbytes=part):
            return memory.analyze(jax.grad(coded), x, W, target="h100").temp_bytes

    parts, whole = needs(2**20), needs(2**30)
    print(f"{parts:,} bytes in parts, {whole:,} as a whole")
    assert parts < 0.75 * whole


def test_small_scores_are_left_as_they_are():
    coded = jc.checkpoint(functools.partial(loss_of, causal), jc.Exact())
    assert _has_loop(coded, X, W)
    for sizes in ({"ratio": 32}, {"slice_nbytes": 2**22}):
        with limits_of(**sizes):
            assert not _has_loop(coded, X, W)


@limits_of(tpu_slice_nbytes=2**17)
def test_where_other_arrays_are_larger_there_are_parts_on_a_tpu_alone():
    head = 0.1 * normal((64, 1024), seed=5)

    def loss(x, w):
        q, k, v = ((jnp.tanh(x) @ w[i]).reshape(*x.shape[:2], 4, 16) for i in range(3))
        return jnp.sin(jax.checkpoint(causal)(q, k, v).reshape(x.shape) @ head).sum()

    coded = jc.checkpoint(loss, jc.Exact())
    loops = [_loops(coded, X, W, platform=platform) for platform in ("cpu", "cuda", "tpu")]
    assert loops == [0, 0, 1]
