"""Policies for models built of `jaxcomp.nn`."""

import jax.numpy as jnp
import pytest
from flax import nnx

import jaxcomp as jc
from tests.helpers import without_remat3, without_type_checks


class Model(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.conv = jc.nn.Conv(3, 4, (3, 3), rngs=rngs)
        self.norm = jc.nn.BatchNorm(4, rngs=rngs)
        self.relu = jc.nn.ReLU()
        self.pool = jc.nn.MaxPool((2, 2))
        self.blocks = nnx.List([jc.nn.Linear(4, 4, rngs=rngs) for _ in range(3)])
        self.stock = nnx.Linear(4, 4, rngs=rngs)


ONE, TWO = jc.Quantize(bits=1), jc.Quantize(bits=2)


def compress(*rules: jc.Rule) -> Model:
    return jc.compress(Model(), jc.Policy(rules))


def _codecs(model: Model) -> dict[str, jc.Codec | None]:
    return {
        "/".join(map(str, path)): module.codec
        for path, module in nnx.iter_modules(model)
        if hasattr(module, "codec")
    }


def test_first_match_wins() -> None:
    model = compress(jc.Rule(ONE, path="blocks/1"), jc.Rule(TWO, op="dot|conv"))
    expected = dict.fromkeys(["blocks/0", "blocks/2", "conv"], TWO)
    assert _codecs(model) == expected | {"blocks/1": ONE, "norm": None, "pool": None, "relu": None}


@pytest.mark.parametrize(
    ("path", "matched"),
    [
        ("blocks/[02]", {"blocks/0", "blocks/2"}),
        ("blocks/.*", {"blocks/0", "blocks/1", "blocks/2"}),
        (".*o.*", {"blocks/0", "blocks/1", "blocks/2", "conv", "norm"}),
        ("conv", {"conv"}),
    ],
)
def test_path_is_a_regular_expression_for_the_whole_path(path: str, matched: set[str]) -> None:
    for rule in (jc.Rule(TWO, op="conv|dot|batch_norm", path=path), jc.Rule(TWO, path=path)):
        found = _codecs(compress(rule))
        assert {p for p, codec in found.items() if codec is not None} == matched


def test_a_codec_is_used_in_every_layer_that_can_save_by_it() -> None:
    packed = {"relu": jc.Packed(bits=1), "pool": jc.Packed(bits=4)}
    blocks = [f"blocks/{i}" for i in range(3)]
    found = _codecs(jc.compress(Model(), TWO))
    assert found == dict.fromkeys([*blocks, "conv", "norm"], TWO) | packed
    found = _codecs(jc.compress(Model(), jc.AvgPool(window=2)))
    assert found == dict.fromkeys([*blocks, "norm"]) | packed | {"conv": jc.AvgPool(window=2)}


@pytest.mark.parametrize(
    "rules",
    [
        (jc.Rule(TWO, op="conv"), jc.Rule(TWO, op="dott")),
        (jc.Rule(TWO, op="conv"), jc.Rule(TWO, op="dot", path="block")),  # a part of a path
        (jc.Rule(TWO, op="dot"), jc.Rule(ONE, op="dot", path="blocks/0")),  # taken before
        (jc.Rule(TWO, op="dot"), jc.Rule(TWO, op="dot")),
        (jc.Rule(TWO, op="dot", path="stock"),),  # a layer of Flax's own
    ],
)
def test_unused_rule_is_an_error_that_names_it_and_changes_nothing(
    rules: tuple[jc.Rule, ...],
) -> None:
    model = Model()
    before = nnx.graphdef(model)
    with pytest.raises(ValueError, match="matches nothing") as error:
        jc.compress(model, jc.Policy(rules))
    assert repr(rules[-1]) in str(error.value)
    assert nnx.graphdef(model) == before
    assert type(model) is Model


def test_rule_that_is_not_required_may_match_nothing() -> None:
    model = compress(jc.Rule(TWO, path="nowhere", required=False), jc.Rule(ONE, op="conv"))
    assert _codecs(model)["conv"] == ONE


@pytest.mark.parametrize(
    ("codec", "op"),
    [
        (jc.AvgPool(window=2), "conv|batch_norm"),
        (jc.AvgPool(window=2), "batch_norm"),
        (jc.Quantize(bits=2), "relu"),
        (jc.Packed(bits=1), "conv"),
        (jc.Packed(bits=2), "relu"),
        (jc.Packed(bits=1), "max_pool"),
        (jc.Cast("bfloat16"), "max_pool"),
    ],
)
def test_codec_that_does_not_fit_is_an_error_and_changes_nothing(codec: jc.Codec, op: str) -> None:
    model = Model()
    before = nnx.graphdef(model)
    rules = (jc.Rule(TWO, path="blocks/0"), jc.Rule(codec, op=op))
    with pytest.raises(ValueError, match=r"stores for|expected Packed|window of 4") as error:
        jc.compress(model, jc.Policy(rules))
    assert repr(rules[-1]) in str(error.value)
    assert nnx.graphdef(model) == before


def test_keep_leaves_a_layer_as_in_flax() -> None:
    for keep in ("keep", jc.Exact()):
        codecs = _codecs(compress(jc.Rule(keep, path="blocks/0|relu"), jc.Rule(ONE, op="dot")))
        assert (codecs["blocks/0"], codecs["relu"], codecs["blocks/1"]) == (None, None, ONE)


def test_layers_keep_the_codecs_that_no_rule_changes() -> None:
    model = Model()
    model.conv.codec = ONE
    assert _codecs(jc.compress(model, jc.Policy((jc.Rule(TWO, op="dot"),))))["conv"] == ONE


def test_uncompress_gives_the_stock_layers_back() -> None:
    model = Model()
    before = nnx.graphdef(model)
    jc.compress(model, "quantize")
    assert nnx.graphdef(model) != before
    with pytest.raises(ValueError, match="model=Model: it is compressed already"):
        jc.compress(model, "quantize")
    assert jc.uncompress(model) is model
    assert nnx.graphdef(model) == before
    with pytest.raises(ValueError, match="model=Model: expected a compressed model"):
        jc.uncompress(model)
    with without_type_checks(), pytest.raises(TypeError, match="expected a Flax NNX module"):
        jc.uncompress(len)


@without_remat3
def test_a_codec_of_ones_own() -> None:
    class Half(jc.Cast):
        name = "half"

    assert _codecs(compress(jc.Rule(Half("float16"), op="conv")))["conv"] == Half("float16")
    jc.policies.save_compressed()


def test_parameters_and_state_stay() -> None:
    model = Model()
    before = nnx.state(model)
    jc.compress(model, "quantize")
    assert all(a is b for a, b in zip(*map(_arrays, (before, nnx.state(model))), strict=True))


def _arrays(state: nnx.State) -> list[object]:
    return [variable[...] for variable in nnx.to_flat_state(state).leaves]


def test_a_module_with_attributes_of_these_names_is_left_alone() -> None:
    class Video(nnx.Module):
        kind, codec = "film", "h264"

    model = nnx.Sequential(Video(), jc.nn.ReLU())
    jc.compress(model, jc.Policy((jc.Rule(jc.Packed(1), op="relu"),)))
    assert (model.layers[0].codec, model.layers[1].codec) == ("h264", jc.Packed(1))


def test_a_rule_for_layers_needs_layers_of_jaxcomp() -> None:
    model = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"op='gelu'\) matches nothing.*has no such layers"):
        jc.compress(model, jc.Policy((jc.Rule(TWO, op="gelu"),)))
    assert type(model) is nnx.Sequential
    model = jc.compress(model, "actnn:level=L1")  # Flax's convolutions have codecs, too
    with pytest.raises(ValueError, match=r"op='conv'\) matches nothing.*stock convolutions"):
        jc.plan(model, jnp.ones((4, 4)))
