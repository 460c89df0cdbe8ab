"""Attentions with constant masks, whose backward passes leave out the keys that are hidden."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxcomp as jc
from jaxcomp import memory
from jaxcomp.transform._pieces.limits import limits_of
from tests.helpers import as_float, assert_close, collectives, normal, replicate, shard
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

X, W = normal((4, 128, 64)), 0.2 * normal((4, 64, 64), seed=1)


@pytest.fixture(autouse=True)
def _small_chunks():
    """Chunks of small scores; programs that were decided about before are forgotten."""
    jax.clear_caches()
    with limits_of(scores=2**12, queries=8), jax.numpy_rank_promotion("allow"):  # for users' masks
        yield


def _before(count=128):
    return jnp.arange(count)[:, None] >= jnp.arange(count)[None]


def _grouped(q, k, v):
    """Keys are rotated inside, as by rotary embeddings."""
    k = rotated(k)
    return causal(q, k[:, :, :2], v[:, :, :2])


def _attend(mask, q, k, v):
    scores = mask(jnp.einsum("bthd,bshd->bhts", q, k) / 4)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)


def _capped(scores):
    return jnp.where(~_before(), -1e30, 8 * jnp.tanh(scores / 8))


def _window(scores):
    far = jnp.arange(128)[None] < jnp.arange(128)[:, None] - 24
    return jnp.where(_before() & ~far, scores, -jnp.inf)


def _added(scores):
    return scores + jnp.where(_before(), 0.1, -jnp.inf)


def _normalized(q, k, v):
    """By a logarithm, with axes of one element."""
    scores = jnp.where(_before(), jnp.einsum("bthd,bshd->bhts", q, k), -1e30)
    weights = jnp.exp(scores - jax.nn.logsumexp(scores, -1, keepdims=True))
    return jnp.einsum("bhts,bshd->bthd", weights, v)


def _work(function, *args):
    """FLOPs of products in a gradient, on one device."""
    lowered = jax.jit(jax.grad(function, (0, 1))).lower(*args)
    return lowered.compile().cost_analysis()["flops"]


@pytest.mark.parametrize(
    ("attend", "least"),
    [
        (causal, 0.87),
        (_grouped, 0.87),
        (_normalized, 0.94),
        (functools.partial(_attend, _capped), 0.94),
        (functools.partial(_attend, _window), 0.86),
        (functools.partial(_attend, _added), 0.94),
    ],
)
def test_gradients(attend, least):
    loss = functools.partial(loss_of, attend)
    coded = jc.checkpoint(loss, jc.Exact())
    assert_close(gradient(coded, X, W), gradient(loss, X, W), 2e-6)
    work = _work(coded, X, W) / _work(loss, X, W)
    print(f"{work:.2f} of the operations")
    assert work < least


def _padded(mask, q, k, v, seen):
    """The first queries of an example see no key."""
    return _attend(lambda s: mask(s, seen[:, None, None]), q, k, v)


def _both(scores, seen):
    return jnp.where(_before() & seen, scores, -1e30)


def _one_by_one(scores, seen):
    return jnp.where(seen, jnp.where(_before(), scores, -1e30), -1e30)


def _bias(scores, seen):
    return jnp.where(_before(), scores + jnp.where(seen, 0.0, -1e30), -1e30)


@pytest.mark.parametrize("mask", [_both, _one_by_one, _bias])
def test_masks_of_data_keep_the_whole(mask):
    """A query that sees no key attends to all alike, also to those that a causal mask hides."""
    seen = jnp.arange(128)[None] >= jnp.array([0, 5, 40, 127])[:, None]

    def loss(x, w):
        return loss_of(functools.partial(_padded, mask, seen=seen), x, w)

    assert_close(gradient(jc.checkpoint(loss, jc.Exact()), X, W), gradient(loss, X, W), 2e-6)


def _same(x, _k, _v):
    return causal(x, x, x)


def _little(scores):
    return jnp.where(jnp.arange(128)[None] >= jnp.arange(128)[:, None] - 64, scores, -1e30)


def _blind(scores):
    """The first query sees no key."""
    return jnp.where(jnp.arange(128)[:, None] > jnp.arange(128)[None], scores, -1e30)


def _cumulative(q, k, v):
    """Queries are no axis of their own."""
    return jnp.cumsum(causal(jnp.cumsum(q, 1), k, v), 1)


def _dropped(q, k, v):
    kept = jax.random.bernoulli(jax.random.key(0), 0.9, (4, 4, 128, 128))

    def mask(scores):
        return jnp.where(_before(), scores, -1e30)

    scores = mask(jnp.einsum("bthd,bshd->bhts", q, k))
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores) * kept, v)


@pytest.mark.parametrize(
    "attend",
    [
        _same,
        functools.partial(_attend, _little),
        functools.partial(_attend, _blind),
        _cumulative,
        _dropped,
    ],
)
def test_what_takes_the_whole_is_left_as_it_is(attend):
    loss = functools.partial(loss_of, attend)
    coded = jc.checkpoint(loss, jc.Exact())
    assert_close(gradient(coded, X, W), gradient(loss, X, W), 2e-6)
    assert _work(coded, X, W) > 0.97 * _work(loss, X, W)


def _packed(x, w):
    """Keys and values in one array: slices that begin within an axis."""
    q, k, v = ((jnp.tanh(x) @ w[i]).reshape(*x.shape[:2], 4, 16) for i in range(3))

    def attend(q, both):
        return causal(q, both[:, :, 0], both[:, :, 1])

    return jnp.sin(jax.checkpoint(attend)(q, jnp.stack([k, v], 2))).sum()


def _positions(x, w):
    """Numbers of queries in bfloat16, which has no odd ones above 256."""

    def attend(q, k, v):
        places = jnp.sin(3 * jnp.arange(1024, dtype=jnp.bfloat16)).astype(jnp.float32)
        return causal(q * (1 + places)[:, None, None], k, v)

    return loss_of(attend, jnp.concatenate([x] * 8, 1)[:1], w)


@pytest.mark.parametrize("loss", [_packed, _positions])
def test_what_else_is_in_a_checkpoint(loss):
    coded = jc.checkpoint(loss, jc.Exact())
    assert_close(gradient(coded, X, W), gradient(loss, X, W), 2e-6)
    assert _work(coded, X, W) < 0.95 * _work(loss, X, W)


def _weights(x, w):
    """Gradients of which only some are sums over queries."""

    def attend(x, k, w):
        wq, wv, rest = jnp.split(w, 3)
        q, v = (jnp.einsum("bthd,de->bthe", y, m) for y, m in ((x, wq[0]), (k, wv[0])))
        return causal(q, k, v), jnp.sin(rest).sum()

    q, k = ((x @ w[i]).reshape(*x.shape[:2], 4, 16) for i in range(2))
    mixed, other = jax.checkpoint(attend)(q, k, w[:3, :16, :16])
    return jnp.sin(mixed).sum() + other


def _biased(x, w):
    """Queries whose scores are all as low as hidden ones, by what is added after the mask."""
    real = (jnp.arange(128)[None] >= jnp.array([0, 5, 40, 127])[:, None])[:, None, :, None]
    low = jnp.where(real, 0.0, jnp.finfo(jnp.float32).min)

    def attend(q, k, v, low):
        return _attend(lambda s: jnp.where(_before(), s, -1e30) + low, q, k, v)

    return loss_of(lambda q, k, v: attend(q, k, v, low), x, w)


def _frozen(x, w):
    @jax.custom_vjp
    def frozen(k):
        return k

    frozen.defvjp(lambda k: (k, None), lambda _, g: (jnp.zeros_like(g),))
    return loss_of(lambda q, k, v: causal(q, frozen(k), v), x, w)


def _printing(x, w):
    def attend(q, k, v):
        jax.debug.callback(lambda _: None, q[0, 0, 0, 0])
        return causal(q, k, v)

    return loss_of(attend, x, w)


@pytest.mark.parametrize("loss", [_weights, _biased, _frozen, _printing])
def test_gradients_that_chunks_would_change(loss):
    coded = jc.checkpoint(loss, jc.Exact())
    assert_close(gradient(coded, X, W), gradient(loss, X, W), 2e-6)


def test_chunks_of_parts_in_a_scan_and_vmap():
    loss = functools.partial(loss_of, causal)
    stack = stacked(loss)
    coded = jc.checkpoint(stack, jc.Exact())
    with limits_of(slice_nbytes=2**15, ratio=0):
        text = jax.jit(jax.grad(coded)).lower(X, W).as_text()
        assert text.count("stablehlo.while") > 2
        assert_close(gradient(coded, X, W), gradient(stack, X, W), 1e-4)
    got, expected = (of_examples(f, X, W) for f in (jc.checkpoint(loss, jc.Exact()), loss))
    assert_close(got, expected, 2e-6)


def test_attention_of_flax():
    """Its mask is made outside, of the shapes of its inputs."""
    layer = nnx.MultiHeadAttention(4, 64, use_bias=False, decode=False, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)

    def loss(state, x):
        mask = nnx.make_causal_mask(x[..., 0])
        return jnp.sin(nnx.merge(graph, state)(x, mask=mask)).sum()

    coded = jc.checkpoint(loss, "quantize:bits=8")
    assert_close(gradient(coded, state, X), gradient(loss, state, X), 0.05)
    work = _work(coded, state, X)
    jax.clear_caches()
    with limits_of(scores=2**30):
        assert work < 0.95 * _work(coded, state, X)


def test_sums_of_chunks_are_precise():
    """Gradients of keys and values are added in float32, so they are rounded once more."""
    q, k, v = (normal((4, 128, 4, 16), jnp.bfloat16, i) for i in range(3))

    def loss(q, k, v):
        attend = functools.partial(_attend, lambda s: jnp.where(_before(), s, -1e30))
        return jnp.sin(jax.checkpoint(attend)(q, k, v).astype(jnp.float32)).sum()

    def errors(function):
        exact = jax.grad(loss, (1, 2))(*(x.astype(jnp.float32) for x in (q, k, v)))
        found = jax.jit(jax.grad(function, (1, 2)))(q, k, v)
        pairs = zip(exact, found, strict=True)
        return np.array([np.linalg.norm(as_float(f) - as_float(e)) for e, f in pairs])

    ours, stock = errors(jc.checkpoint(loss, jc.Exact())), errors(loss)
    print(f"{ours / stock} of the error of JAX")
    assert np.all(ours < 1.5 * stock)


def test_weights_that_all_devices_share():
    loss = projected(W[3])
    coded, stock = (over_devices(f, True) for f in (jc.checkpoint(loss, jc.Exact()), loss))
    assert _work(coded, X, W) < 0.95 * _work(stock, X, W)
    assert_close(gradient(coded, X, W), gradient(stock, X, W), 1e-5)


def test_masks_of_chunks_are_in_memory():
    """Each is one barrier's, without the axes of examples and heads."""
    coded = jc.checkpoint(functools.partial(loss_of, causal), jc.Exact())
    text = jax.jit(jax.grad(coded)).lower(X, W).as_text()
    for keys in (32, 64, 96, 128):
        assert re.search(rf"optimization_barrier %\S+ : tensor<(1x1x)?32x{keys}xi1>", text)


def test_several_devices_keep_the_whole():
    coded = jc.checkpoint(functools.partial(loss_of, causal), jc.Exact())
    x, w = shard(jnp.concatenate([X, X])), replicate(W)
    assert not collectives(jax.grad(coded), x, w)
    assert_close(jax.jit(jax.grad(coded))(x, w), jax.grad(coded)(jnp.concatenate([X, X]), W), 1e-5)


@pytest.mark.parametrize("check", [True, False])
def test_shard_map(check):
    loss = functools.partial(loss_of, causal)
    coded, stock = (over_devices(f, check) for f in (jc.checkpoint(loss, jc.Exact()), loss))
    assert _work(coded, X, W) < 0.9 * _work(stock, X, W)
    assert_close(gradient(coded, X, W), gradient(stock, X, W), 1e-5)


@pytest.mark.aot
@limits_of(queries=128)
def test_a_step_moves_less():
    x, w = normal((8, 1024, 64)), W
    loss = functools.partial(loss_of, causal)
    coded, stock = (
        memory.analyze(jax.grad(f), x, w, target="h100")
        for f in (jc.checkpoint(loss, jc.Exact()), loss)
    )
    print(f"{coded.hbm_traffic_bytes:,} bytes in chunks, {stock.hbm_traffic_bytes:,} in JAX")
    assert coded.hbm_traffic_bytes < 0.8 * stock.hbm_traffic_bytes
    assert coded.temp_bytes < 0.7 * stock.temp_bytes
