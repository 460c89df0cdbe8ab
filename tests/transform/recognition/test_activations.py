"""Activation functions of a program whose arguments have the only code."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxcomp as jc
from tests.helpers import (
    assert_close,
    assert_same_bits,
    assert_scattered_by_chance,
    distance,
    kept,
    normal,
    only,
    slow,
)

CODEC = jc.Quantize(bits=4)
X = normal((4, 32, 16))
UP, GATE, DOWN = (0.3 * normal(s, seed=i) for i, s in enumerate([(16, 24), (16, 24), (24, 16)]))
MAP = normal((2, 12, 12, 8))
KERNEL = 0.2 * normal((3, 3, 8, 8), seed=3)


def dense(x, up, down):
    return jax.nn.gelu(x @ up) @ down


def erf(x, up, down):
    return jax.nn.gelu(x @ up, approximate=False) @ down


def quick(x, up, down):
    h = x @ up
    return (h * jax.nn.sigmoid(1.702 * h)) @ down


def gated(x, up, gate, down):
    return ((x @ up) * jax.nn.silu(x @ gate)) @ down


def twice(x, up, a, b):
    h = jax.nn.gelu(x @ up)
    return h @ a + h @ b


def turned(x, up, down):
    """The weights come first, and features are not last."""
    h = jax.nn.gelu(jnp.einsum("io,bti->bot", up, x))
    return jnp.einsum("oi,bot->ibt", down, h)


def experts(x, up, down):
    h = jax.nn.gelu(jnp.einsum("eti,eio->eto", x, up))
    return jnp.einsum("eto,eoi->eti", h, down)


def convolved(layout, x, first, second):
    def conv(x, kernel):
        dims = (layout, "HWIO", layout)
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims)

    return conv(jax.nn.silu(conv(jnp.sin(x), first)), second)


CASES = {
    "dense": (dense, (X, UP, DOWN)),
    "erf": (erf, (X, UP, DOWN)),
    "quick": (quick, (X, UP, DOWN)),
    "of_two_axes": (dense, (X[0], UP, DOWN)),
    "gated": (gated, (X, UP, GATE, DOWN)),
    "twice": (twice, (X, UP, DOWN, DOWN + 0.1)),
    "turned": (turned, (X, UP, DOWN)),
    "experts": (experts, (X, jnp.stack([UP] * 4), jnp.stack([DOWN] * 4))),
    "NHWC": (functools.partial(convolved, "NHWC"), (MAP, KERNEL, KERNEL + 0.01)),
    "NCHW": (
        functools.partial(convolved, "NCHW"),
        (jnp.moveaxis(MAP, -1, 1), KERNEL, KERNEL + 0.01),
    ),
}


def units(function, *args, codec=CODEC):
    return [v for v in jc.checkpoint(function, codec).plan(*args).values if v.op == "activation"]


def loss_of(function):
    return lambda *args: jnp.mean(jnp.sin(3 * function(*args).astype(jnp.float32)))


@pytest.mark.parametrize("name", kept(CASES, ("dense", "gated", "turned", "NCHW")))
def test_results_are_exact_and_gradients_unbiased(name):
    function, args = CASES[name]
    loss = loss_of(function)
    (unit,) = units(loss, *args)
    assert unit.saved_bytes < 0.25 * unit.exact_bytes
    assert_same_bits(jax.jit(jc.checkpoint(function, CODEC))(*args), jax.jit(function)(*args))
    of_all = tuple(range(len(args)))
    exact = jax.jit(jax.grad(loss, of_all))(*args)

    def draw(seed):
        return jax.grad(jc.checkpoint(loss, CODEC, seed=seed), of_all)(*args)

    draws = jax.jit(jax.vmap(draw))(jnp.arange(64, dtype=jnp.uint32))
    for found, expected in zip(draws, exact, strict=True):
        assert 1e-4 < distance(found[0], expected) < 0.2
    assert_scattered_by_chance(draws, exact)


def gated_in_float32(x, up, gate, down):
    h = (x @ up).astype(jnp.float32) * jax.nn.silu((x @ gate).astype(jnp.float32))
    return h.astype(x.dtype) @ down


@pytest.mark.parametrize("function", [gated, gated_in_float32])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, slow(jnp.float16)])
def test_half_precision(dtype, function):
    args = [a.astype(dtype) for a in (X, UP, GATE, DOWN)]
    assert len(units(function, *args)) == 1
    assert_same_bits(jax.jit(jc.checkpoint(function, CODEC))(*args), jax.jit(function)(*args))
    found, exact = (
        jax.jit(jax.grad(loss_of(f), (0, 1, 3)))(*args)
        for f in (jc.checkpoint(function, CODEC), function)
    )
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == dtype and distance(one, other) < 0.2


def test_what_else_reads_the_result_keeps_its_own_code():
    def also_added(x, up, down):
        h = jax.nn.gelu(x @ up)
        return jnp.sum(h @ down) + jnp.sum(h * h)

    def returned(x, up, down):
        h = jax.nn.gelu(x @ up)
        return h @ down, h

    def squared(x, up):
        h = jax.nn.gelu(x @ up)
        return jnp.einsum("bti,bsi->bts", h, h)

    def dropped(x, up, down):
        kept = jax.random.bernoulli(jax.random.key(0), 0.9, (*x.shape[:-1], up.shape[1]))
        return jnp.where(kept, jax.nn.gelu(x @ up), 0) @ down

    for function in (also_added, returned, dropped):
        assert units(function, X, UP, DOWN) == []
    assert units(squared, X, UP) == []


def test_a_product_with_frozen_weights_needs_no_result():
    def frozen(x, up):
        return dense(x, up, DOWN)

    def partly(x, up, adapter):
        h = jax.nn.gelu(x @ up)
        return h @ DOWN + h @ adapter

    assert units(frozen, X, UP) == []
    assert len(units(partly, X, UP, 0.1 * DOWN)) == 1


def test_what_follows_from_arguments_has_no_code():
    def of_argument(x, down):
        return jax.nn.gelu(x) @ down

    def of_two(x, bias, down):
        a, b = jnp.split(x + bias, 2, -1)
        return (jax.nn.silu(a) * b) @ down[:8]

    x, bias = normal((4, 32, 24)), jnp.ones((1, 1, 16))
    assert jc.checkpoint(of_argument, CODEC).plan(x, DOWN).saved_bytes == 0
    assert jc.checkpoint(of_two, CODEC).plan(X, bias, DOWN).saved_bytes == 0


def test_what_is_computed_besides_is_no_weight():
    """A unit's product would save it exactly."""

    def scores(x, up, down):
        return jax.nn.gelu(x @ up) @ jnp.sin(x @ up).swapaxes(1, 2)

    def merged(x, up, down, adapter):
        return jax.nn.gelu(x @ up) @ (down + adapter @ adapter.T @ down)

    def view(x, up, down):
        return jax.nn.gelu(x @ up) @ down.astype(jnp.bfloat16).astype(jnp.float32).T.T[:, :8]

    assert units(scores, X, UP, DOWN) == []
    assert units(merged, X, UP, DOWN, DOWN) == []
    assert len(units(view, X, UP, DOWN)) == 1


def test_rules_decide_as_for_the_values():
    large = X.size * 2
    assert units(dense, X, UP, DOWN, codec=only(CODEC, min_size=large)) == []
    assert units(dense, X, UP, DOWN, codec=only(CODEC, roles=("operand",))) == []
    assert len(units(dense, X, UP, DOWN, codec=only(CODEC, min_size=32))) == 1
    (unit,) = units(dense, X, UP, DOWN, codec=jc.Offload(CODEC))
    assert unit.saved_bytes == 0 and unit.decision == str(jc.Offload(CODEC))


def test_vmap_scan_and_remat_have_the_noise_of_each_layer_and_example():
    def layer(x, w):
        return x + gated(x, *w)

    def stack(x, ws):
        return jnp.sum(jnp.sin(lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0]))

    ws = jax.tree.map(lambda w: jnp.stack([w, w]), (UP, GATE, DOWN))
    coded = jc.checkpoint(stack, CODEC)
    exact, found = (jax.jit(jax.grad(f, 1))(X, ws) for f in (stack, coded))
    errors = jax.tree.map(lambda a, b: a - b, found, exact)
    for error, expected in zip(jax.tree.leaves(errors), jax.tree.leaves(exact), strict=True):
        assert distance(error + expected, expected) < 0.2
        assert abs(np.corrcoef(error[0].ravel(), error[1].ravel())[0, 1]) < 0.3
    again = jax.jit(jax.grad(jax.checkpoint(coded), 1))(X, ws)
    assert_close(again, found)
    both = jnp.stack([X, X + 0.1])
    of_each = jax.jit(jax.vmap(jax.grad(coded, 1), (0, None)))(both, ws)
    assert_close(jax.tree.map(lambda g: g[0], of_each), found, rtol=1e-4)
