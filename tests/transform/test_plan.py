"""What plans say: where values are made, and why they are saved as they are."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxcomp as jc
from tests.helpers import only
from tests.transform.mlp import CODEC, W1, W2, X, mlp


def test_what_a_function_of_jaxs_own_makes_has_the_line_of_its_caller():
    def line(function):
        found = {v.source for v in jc.checkpoint(function, CODEC).plan(X, W1, W2).values}
        (source,) = found
        return int(source.removeprefix("test_plan.py:"))

    def one(x, w1, w2):
        h = x @ w1
        return jnp.where(h > 0, h, 0) @ w2

    def other(x, w1, w2):
        h = x @ w1
        return jnp.where(h > 0, h, 0) @ w2

    assert line(other) == line(one) + 4


def test_branches_save_as_little_outside_of_checkpoint_as_inside():
    def either(x, w1, w2):
        layer = jc.checkpoint(mlp, CODEC) if inside else mlp
        return lax.cond(x[0, 0] > 0, lambda x: layer(x, w1, w2), lambda x: -x, x).sum()

    inside = False
    outer = jc.checkpoint(either, CODEC).plan(X, W1, W2)
    inside = True
    inner = jc.checkpoint(either, CODEC).plan(X, W1, W2)
    assert inner.saved_bytes / 2 < outer.saved_bytes <= inner.saved_bytes

    def loop(x, w1, w2):
        step = functools.partial(lax.cond, True, lambda x: x + mlp(x, w1, w2), lambda x: x)
        return lax.scan(lambda x, flag: (step(x), None), x, jnp.arange(8))[0].sum()

    in_loop = jc.checkpoint(loop, CODEC).plan(X, W1, W2)
    assert any(v.note.startswith("8 iterations; branches[1]") for v in in_loop.values)
    assert in_loop.saved_bytes < 0.2 * in_loop.exact_bytes


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.complex64])
def test_the_plan_says_which_dtypes_have_no_codec(dtype):
    def layer(x, w):
        return jnp.tanh(jnp.tanh(x @ w) @ w)

    with jax.enable_x64():
        x, w = jnp.ones((64, 32), dtype), jnp.ones((32, 32), dtype)
        notes = {v.note for v in jc.checkpoint(layer, CODEC).plan(x, w).values}
        assert any(f"no codec encodes {jnp.dtype(dtype).name}" in note for note in notes)
        with pytest.raises(ValueError, match=f"dtypes: {jnp.dtype(dtype).name} "):
            jc.checkpoint(layer, only(CODEC)).plan(x, w)


def test_the_plan_says_when_its_codecs_store_nothing():
    def named(x, w1, w2):
        return jnp.sin(checkpoint_name(jax.nn.gelu(x @ w1), "hidden") @ w2)

    plan = jc.checkpoint(named, only(CODEC, names=("hidden",))).plan(X, W1, W2)
    assert "codecs encode nothing" in str(plan)
    assert "codecs encode nothing" not in str(jc.checkpoint(named, CODEC).plan(X, W1, W2))


def test_codes_of_an_inner_call_are_listed_beside_the_exact_bytes_of_their_values():
    def two(x, w1, w2, layer=mlp):
        return jnp.sin(layer(x, w1, w2))

    stock = jc.checkpoint(two, CODEC).plan(X, W1, W2)
    inner = jc.checkpoint(functools.partial(two, layer=jc.checkpoint(mlp, CODEC)), CODEC)
    mixed = inner.plan(X, W1, W2)
    assert mixed.exact_bytes == stock.exact_bytes
    assert mixed.saved_bytes == stock.saved_bytes
    codes = [value for value in mixed.values if value.decision == "code"]
    assert codes and len(codes) < len(mixed.values)
    assert all(v.saved_bytes == v.exact_bytes and not v.role for v in codes)
