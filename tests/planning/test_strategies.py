import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxcomp as jc
from jaxcomp.planning import Strategy
from jaxcomp.policies import recipes


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("plain", Strategy("plain")),
        ("remat", Strategy("remat", remat=True)),
        (
            "remat:dots",
            Strategy(
                "remat:dots", remat=True, remat_policy=jax.checkpoint_policies.checkpoint_dots
            ),
        ),
        (
            "boundary:quantize:bits=8",
            Strategy("boundary:quantize:bits=8", remat=True, block_codec=jc.Quantize(bits=8)),
        ),
        ("remat:3", Strategy("remat:3", remat=True, first_blocks=(3, 0))),
        (
            "remat:dots:12",
            Strategy(
                "remat:dots:12",
                remat=True,
                remat_policy=jax.checkpoint_policies.checkpoint_dots,
                first_blocks=(0, 12),
            ),
        ),
        (
            "accumulate:2:remat:3+weights:1",
            Strategy(
                "accumulate:2:remat:3+weights:1",
                remat=True,
                remat_policy=Strategy.parse("remat:weights").remat_policy,
                first_blocks=(3, 1),
                micro_batches=2,
            ),
        ),
        ("accumulate:4", Strategy("accumulate:4", micro_batches=4)),
        (
            "accumulate:2:transformer:bits=2",
            Strategy(
                "accumulate:2:transformer:bits=2",
                micro_batches=2,
                policy=recipes.transformer(2),
            ),
        ),
        ("exact", Strategy("exact", policy=recipes.everywhere(jc.Exact()))),
        (
            "quantize:bits=2",
            Strategy("quantize:bits=2", policy=recipes.everywhere(jc.Quantize(bits=2))),
        ),
    ],
)
def test_parse(spec, expected):
    assert Strategy.parse(spec) == expected


@pytest.mark.parametrize(
    "spec",
    [
        "accumulate",
        "accumulate:",
        "accumulate:0",
        "accumulate:1",
        "accumulate:-2",
        "accumulate:x",
        "accumulate:2:accumulate:2",
        "accumulate:\u0664",
        "accumulate:99999999999999999999999",
    ],
)
def test_parse_wrong_accumulate(spec):
    with pytest.raises(ValueError, match=rf"{spec}': expected accumulate:N with N=2 or more"):
        Strategy.parse(spec)


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "plane",
        "plain:2",
        "remat:conv",
        "remat:0",
        "remat:-1",
        "remat:dots:0",
        "remat:dots:1:2",
        "remat:\u0664",
        "remat:fused",
        "boundary:fused",
        "quantize:bits=7",
        "compress:fused",
        "offload:offload:quantize",
    ],
)
def test_parse_unknown(spec):
    with pytest.raises(ValueError, match=f"strategy='{spec}'"):
        Strategy.parse(spec)


def test_parse_unknown_strategy_of_micro_batches():
    with pytest.raises(ValueError, match="strategy='plane' is unknown; did you mean 'plain'"):
        Strategy.parse("accumulate:2:plane")


def test_a_codec_of_recomputed_blocks_has_another_name():
    with pytest.raises(ValueError, match=r"recomputed blocks is boundary:CODEC"):
        Strategy.parse("remat:quantize:bits=8")


def test_policies_and_codecs_stand_for_strategies():
    policy = recipes.transformer(2)
    assert Strategy.of(policy) == Strategy(repr(policy), policy=policy)
    assert Strategy.of(jc.Quantize(2)).policy == recipes.everywhere(jc.Quantize(2))
    assert Strategy.of("remat") == Strategy.of(Strategy.parse("remat")) == Strategy.parse("remat")
    for wrong in (3, None):
        with pytest.raises(TypeError, match=f"policy={wrong}: expected"):
            Strategy.of(wrong)
    with pytest.raises(TypeError, match="strategy=3: expected text"):
        Strategy.parse(3)


def test_check_batch():
    Strategy.parse("accumulate:2").check_batch(batch=16, devices=8)
    with pytest.raises(ValueError, match="batch=24: expected a multiple of 16"):
        Strategy.parse("accumulate:2").check_batch(batch=24, devices=8)
    with pytest.raises(ValueError, match="batch=12: expected a multiple of 8"):
        Strategy.parse("plain").check_batch(batch=12, devices=8)
    with pytest.raises(ValueError, match="batch=16: expected a multiple of 3"):
        Strategy.parse("accumulate:3").check_batch(batch=16, devices=1)


def mlp():
    def block():
        return nnx.Sequential(jc.nn.Linear(16, 16, rngs=nnx.Rngs(0)), jnp.sin)

    return nnx.Sequential(block(), block())


def test_a_strategy_is_applied_to_the_model():
    model = mlp()
    assert Strategy.parse("plain")(model) is model
    assert model.layers[0].layers[0].codec is None
    assert Strategy.parse("quantize:bits=4")(model) is model
    assert model.layers[0].layers[0].codec == jc.Quantize(bits=4)


def test_any_model_is_compressed():
    model = nnx.Sequential(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), jnp.sin)
    assert Strategy.parse("quantize:bits=2")(model) is model
    (value,) = jc.plan(model, jax.ShapeDtypeStruct((512, 64), jnp.float32)).values
    assert value.decision.startswith("Quantize(bits=2")


@pytest.mark.parametrize(
    ("spec", "stored", "changed"),
    [
        ("plain", 2, [False, False]),
        ("remat", 1, [True, True]),
        ("remat:dots", 2, [True, True]),
        ("remat:1", 1, [True, False]),
        ("remat:dots:1", 2, [True, False]),
        ("remat:1+dots:1", 1, [True, True]),
    ],
)
def test_what_of_a_block_waits(spec, stored, changed):
    """Of two blocks: both cosines; the second's input, the first's being given; both products."""
    model = Strategy.parse(spec)(mlp())
    assert [type(block) is not nnx.Sequential for block in model.layers] == changed
    x = jax.ShapeDtypeStruct((64, 16), jnp.float32)
    step = nnx.grad(lambda model, x: model(x).sum(), argnums=1)
    residuals = jc.memory.declared_residuals(jax.make_jaxpr(step)(model, x))
    assert [r.shape for r in residuals].count((64, 16)) == stored


def test_blocks_that_are_not_there_are_an_error():
    with pytest.raises(ValueError, match="model=Sequential: expected 3 blocks or more, not 2"):
        Strategy.parse("remat:1+dots:2")(mlp())
    with pytest.raises(ValueError, match="strategy='remat:1': expected a Flax NNX model"):
        Strategy.parse("remat:1")(jnp.sin)


def test_plain_is_told_from_others():
    assert Strategy.parse("plain").is_plain
    assert Strategy.parse("exact").is_plain
    for spec in ("remat", "offload", "accumulate:2", "quantize:bits=2"):
        assert not Strategy.parse(spec).is_plain
