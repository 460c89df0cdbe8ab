"""What compilers make of a second norm and of a pool in the one rule; nothing is run."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

from jaxcomp import SignAware, memory, ops
from jaxcomp._core import platforms
from jaxcomp.ops import _norm_act_vjp


def both_passes(fn, *shapes):
    """The value and all gradients for a cotangent that is in memory, and the arguments."""
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def run(cotangent, *args):
        y, pull = jax.vjp(fn, *args)
        return y, pull(cotangent)

    return run, jax.eval_shape(fn, *args), *args


def traffic(fn, *shapes, target="h100"):
    return memory.analyze(*both_passes(fn, *shapes), target=target).hbm_traffic_bytes


def maps(fn, shape, *shapes):
    """All floating-point arrays of the first argument's shape that are in memory."""
    found = memory.timeline(*both_passes(fn, shape, *shapes), target="h100").buffers
    dims = str([*shape]).replace(" ", "")
    return sorted(b.shape for b in found if re.fullmatch(r"b?f\d+" + re.escape(dims), b.shape))


@pytest.mark.aot
def test_an_h100_moves_less_for_two_norms_at_once():
    x, row = (64, 28, 28, 256), (256,)
    codec = SignAware(bits=4)

    def at_once(x, s, b, r, rs, rb):
        return ops.norm_act(x, s, b, r, residual_norm=(rs, rb), codec=codec)[0].value

    def apart(x, s, b, r, rs, rb):
        shortcut, *_ = ops.norm_act(r, rs, rb, relu=False, codec=codec)
        return ops.norm_act(x, s, b, shortcut, codec=codec)[0].value

    shapes = x, row, row, x, row, row
    found, expected = traffic(at_once, *shapes), traffic(apart, *shapes)
    print(f"h100, sum of two norms: {found} bytes, {expected} with one after the other")
    assert found < expected - 2 * math.prod(x)


@pytest.mark.aot
def test_a_tpu_sums_over_the_map(monkeypatch):
    x, row = (16, 112, 112, 64), (64,)
    window = (3, 3), (2, 2), ((1, 1), (1, 1))

    def pooled(x, s, b):
        return ops.norm_act(x, s, b, pool=window, codec=SignAware(bits=4))[0].value

    found = traffic(pooled, x, row, row, target="v5e")
    monkeypatch.setattr(
        platforms, "pool_over_map_on_tpu", lambda given, _, windows: windows(*given)
    )
    expected = traffic(pooled, x, row, row, target="v5e")
    print(f"v5e, pooled norm: {found} bytes, {expected} with sums over the windows")
    assert 2 * found < expected


@pytest.mark.aot
def test_an_h100_never_writes_what_is_pooled(monkeypatch):
    """By the arrays in memory; and by the traffic where each norm takes its two sums apart."""
    x, row = (64, 56, 56, 64), (64,)
    codec = SignAware(bits=4)
    window = (3, 3), (2, 2), ((1, 1), (1, 1))

    def at_once(x, s, b):
        return ops.norm_act(x, s, b, pool=window, codec=codec)[0].value

    def apart(x, s, b):
        y = ops.norm_act(x, s, b, codec=codec)[0]
        return ops.encode_activation(ops.max_pool(y.value, *window), y.channel_scale, y.codec).value

    found, expected = maps(at_once, x, row, row), maps(apart, x, row, row)
    print(f"h100, pooled norm: {found} maps in memory, {expected} with one after the other")
    assert found == ["bf16[64,56,56,64]"] * 2  # the argument and its gradient
    assert len(expected) > len(found)

    def sums_apart(one, other, axes):
        return one.sum(axes), other.sum(axes)

    monkeypatch.setattr(_norm_act_vjp, "sums_of", sums_apart)
    found, expected = traffic(at_once, x, row, row), traffic(apart, x, row, row)
    print(f"h100, pooled norm: {found} bytes, {expected} with one after the other")
    assert found < expected - 1.5 * 2 * math.prod(x)
