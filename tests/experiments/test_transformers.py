"""Transformers in plain Flax, and their training steps under `recipes.transformer`."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
from flax import nnx

import jaxcomp as jc
from experiments.bench import transformers as bench
from experiments.zoo import transformers
from jaxcomp.models import _lm
from jaxcomp.planning import Strategy
from tests.helpers import assert_close, assert_same_bits, assert_unbiased, normal, only, slow

SHAPE = _lm.Shape(width=32, depth=2, heads=4)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 17, (8, 64)))


@nnx.jit(static_argnames="kind")
def stock(kind=_lm.LM):
    return kind(17, 64, SHAPE, dtype=jnp.float32, rngs=nnx.Rngs(0))


def create(policy=None):
    return stock() if policy is None else jc.compress(stock(), policy)


def loss(model):
    return jnp.sin(3 * model(TOKENS)).sum()


@pytest.mark.parametrize("causal", [True, False])
def test_queries_that_take_turns_see_the_same(causal):
    q, k, v = (normal((2, 12, 3, 8), seed=i) for i in range(3))
    whole = jax.nn.dot_product_attention(q, k, v, is_causal=causal)
    assert_close(_lm.attend(q, k, v, causal, 12), whole, 1e-6)
    assert_close(_lm.attend(q, k, v, causal, 4), whole, 1e-6)
    with pytest.raises(ValueError, match="queries=5: expected a divisor of the length, 12"):
        _lm.attend(q, k, v, causal, 5)


def test_blocks_under_a_scan_compute_the_same_and_are_compressed():
    model = stock(_lm.ScannedLM)
    unrolled = create()
    unrolled.embed, unrolled.position, unrolled.norm = model.embed, model.position, model.norm
    for number, block in enumerate(unrolled.blocks):
        of_block = jax.tree.map(lambda x, n=number: x[n], nnx.state(model.blocks))
        nnx.update(block, of_block)
    expected = nnx.jit(nnx.grad(loss))(unrolled)
    found = nnx.jit(nnx.grad(loss))(jc.compress(model, jc.recipes.transformer(8)))
    for name in ("embed", "norm"):
        got, wanted = (jax.tree.leaves(nnx.to_pure_dict(g)[name]) for g in (found, expected))
        for a, b in zip(got, wanted, strict=True):
            assert np.linalg.norm(a - b) < 0.02 * np.linalg.norm(b)
    plan = jc.plan(model, TOKENS)
    exact = [v for v in plan.values if v.decision == "exact" and v.shape == (2, 8, 64, 32)]
    assert [v.role for v in exact] == ["input"]  # of a block, so that its first norm is exact


def test_blocks_under_a_scan_take_no_coded_inputs():
    with pytest.raises(ValueError, match="expected none that encodes blocks' inputs"):
        _lm.scanned_lm(Strategy.parse("boundary:quantize:bits=8"), 1)


def test_blocks_under_a_scan_are_recomputed():
    def recomputed(spec):  # in plain, the scores of the attentions
        step, args = _lm.scanned_lm(Strategy.parse(spec), 1)
        return str(step.trace(*args).jaxpr).count("prevent_cse")

    assert recomputed("remat") > recomputed("plain")


def test_queries_keys_and_values_are_not_stored():
    plan, with_them = (
        jc.plan(create(policy), TOKENS)
        for policy in (jc.recipes.transformer(4), only(jc.Quantize(4), min_size=2**14))
    )
    attention = (8, 64, 4, 8)
    assert sum(v.shape == attention for v in with_them.values if v.role == "other") == 6
    assert not any(v.role == "other" for v in plan.values)
    # The second block's are made again from its input, the first's from the tokens.
    exact = [v for v in plan.values if v.decision == "exact" and v.shape == (8, 64, 32)]
    assert [v.path for v in exact] == ["blocks/0"]


def test_the_forward_pass_is_exact_and_so_is_what_is_computed_again():
    again = only("cheapest", roles=("other",))
    plain, exact, coded = create(), create(again), create(jc.recipes.transformer(2))
    call = nnx.jit(lambda model: model(TOKENS))
    assert_same_bits(call(coded), call(plain))
    gradient = nnx.jit(nnx.grad(loss))
    assert_close(jax.tree.leaves(gradient(exact)), jax.tree.leaves(gradient(plain)), 1e-4)


@pytest.mark.slow
def test_the_gradient_is_unbiased():
    """But for the norms, whose inputs come twice across a mean of 32: they are exact here."""
    norms = only("keep", path=".*norm.?")
    model = create(norms + jc.recipes.transformer(2))
    model.unused = nnx.Param(jnp.zeros(()))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def gradient(draw):
        drawn = jax.tree.map(lambda p: p if p.shape else draw, params)
        grads = jax.grad(lambda p: loss(nnx.merge(graphdef, p, rest, copy=True)))(drawn)
        return [grads["blocks"][0][name]["kernel"][...] for name in ("up", "down")]

    draws = jax.jit(lambda d: jax.lax.map(gradient, d, batch_size=20))(jnp.arange(200.0))
    exact = nnx.jit(nnx.grad(loss))(create())
    for name, found in zip(("up", "down"), draws, strict=True):
        assert_unbiased(found, exact["blocks"][0][name]["kernel"][...])


@pytest.mark.parametrize(
    "steps",
    [
        [(_lm.lm, 8), (transformers.vit_b16, 4)],
        slow([(transformers.long_lm, 1)]),
    ],
)
def test_steps_are_those_of_any_strategy(steps):
    for make, batch in steps:
        step, arguments = make(Strategy.parse("plain"), batch)
        state, metrics = jax.eval_shape(step, *arguments)
        assert metrics.loss.shape == ()
        assert jax.tree.structure(state) == jax.tree.structure(arguments[0])


def test_frontier_is_drawn(tmp_path, monkeypatch):
    written = {"hbm_traffic_bytes": 2, "total_bytes": 2**20, "error": None}
    rows = [
        {"row": "plain"} | written,
        {"row": "quantize:bits=4"} | written | {"hbm_traffic_bytes": 3},
        {"row": "remat"} | written | {"error": "refused"},
    ]

    def tabulate(make_step, strategies, title, batch, target, folder, add):
        folder.mkdir()
        (folder / "memory.json").write_text(json.dumps({"rows": rows}))
        assert ("accumulate:4" in strategies) == (batch > 1)

    monkeypatch.setattr(bench, "tabulate", tabulate)
    bench.main(tmp_path, target="h100")
    assert all((tmp_path / case / "frontier.png").exists() for case in bench.CASES)
    with pytest.raises(ValueError, match="expected plain among them"):
        bench.draw(rows[1:], "", tmp_path / "frontier.png")
    with pytest.raises(typer.BadParameter, match=r"case=\['gpt'\]: expected of"):
        bench.main(tmp_path, case=["gpt"])
