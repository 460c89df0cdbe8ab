import pytest
from flax import nnx

import jaxcomp as jc
from tests.helpers import without_type_checks


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


def _codecs(model: Model) -> dict[str, jc.Codec | None]:
    return {
        "/".join(map(str, path)): module.codec
        for path, module in nnx.iter_modules(model)
        if hasattr(module, "codec")
    }


def test_first_match_wins() -> None:
    model = Model()
    plan = jc.apply(model, (jc.Rule(ONE, path="blocks/1"), jc.Rule(TWO, op="dot|conv")))
    expected = dict.fromkeys(["blocks/0", "blocks/2", "conv"], TWO)
    expected |= {"blocks/1": ONE, "norm": None, "pool": None, "relu": None}
    assert _codecs(model) == expected
    assert {d.path: d.codec for d in plan.decisions} == {
        path: codec or jc.Exact() for path, codec in expected.items()
    }
    assert {d.path: d.kind for d in plan.decisions} == {
        "blocks/0": "dot",
        "blocks/1": "dot",
        "blocks/2": "dot",
        "conv": "conv",
        "norm": "batch_norm",
        "pool": "max_pool",
        "relu": "relu",
    }


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
    model = Model()
    jc.apply(model, (jc.Rule(TWO, op="conv|dot|batch_norm", path=path),))
    assert {p for p, codec in _codecs(model).items() if codec is not None} == matched


@pytest.mark.parametrize(
    "rules",
    [
        (jc.Rule(TWO, op="conv"), jc.Rule(TWO, path="block")),  # a part of a path is no match
        (jc.Rule(TWO, op="conv"), jc.Rule(TWO, op="dott")),
        (jc.Rule(TWO, op="dot"), jc.Rule(ONE, path="blocks/0")),  # an earlier rule took it
        (jc.Rule(TWO, op="dot"), jc.Rule(TWO, op="dot")),
        (jc.Rule(TWO, path="stock"),),  # Flax's own layers have no coded form
    ],
)
def test_unused_rule_is_an_error_that_names_it_and_changes_nothing(
    rules: tuple[jc.Rule, ...],
) -> None:
    model = Model()
    before = nnx.graphdef(model)
    with pytest.raises(ValueError, match="matches nothing") as error:
        jc.apply(model, rules)
    assert repr(rules[-1]) in str(error.value)
    assert nnx.graphdef(model) == before


def test_rule_that_is_not_required_may_match_nothing() -> None:
    model = Model()
    jc.apply(model, (jc.Rule(TWO, path="nowhere", required=False), jc.Rule(ONE, op="conv")))
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
        jc.apply(model, rules)
    assert repr(rules[-1]) in str(error.value)
    assert nnx.graphdef(model) == before


def test_exact_leaves_a_layer_as_in_flax() -> None:
    model = Model()
    jc.apply(model, (jc.Rule(TWO, op="dot"),))
    plan = jc.apply(model, (jc.Rule(jc.Exact(), path="blocks/0|relu"), jc.Rule(ONE, op="dot")))
    codecs = _codecs(model)
    assert (codecs["blocks/0"], codecs["relu"], codecs["blocks/1"]) == (None, None, ONE)
    assert {d.codec for d in plan.decisions if d.path == "blocks/0"} == {jc.Exact()}


def test_exact_undoes_all_and_no_rules_nothing() -> None:
    model = Model()
    before = nnx.graphdef(model)
    jc.apply(model, jc.recipes.from_spec("quantize"))
    assert nnx.graphdef(model) != before
    coded = nnx.graphdef(model)
    plan = jc.apply(model, ())
    assert nnx.graphdef(model) == coded
    assert {d.kind: d.codec for d in plan.decisions}["conv"] == jc.Quantize()
    jc.apply(model, jc.recipes.from_spec("exact"))
    assert nnx.graphdef(model) == before


def test_rules_must_be_rules() -> None:
    rule = jc.Rule(TWO, op="dot")
    for wrong in ("quantize:bits=2", rule, [TWO], (r for r in [rule])):
        with without_type_checks(), pytest.raises(TypeError, match="expected a tuple of Rule"):
            jc.apply(Model(), wrong)
    with without_type_checks(), pytest.raises(TypeError, match="expected a codec such as"):
        jc.Rule("quantize:bits=2")


def test_a_codec_of_ones_own() -> None:
    class Half(jc.Cast):
        name = "half"

    model = Model()
    jc.apply(model, (jc.Rule(Half("float16"), op="conv"),))
    assert _codecs(model)["conv"] == Half("float16")
    jc.policies.save_compressed()


def test_parameters_and_state_stay() -> None:
    model = Model()
    before = nnx.state(model)
    jc.apply(model, jc.recipes.from_spec("quantize"))
    assert all(a is b for a, b in zip(*map(_arrays, (before, nnx.state(model))), strict=True))


def _arrays(state: nnx.State) -> list[object]:
    return [variable[...] for variable in nnx.to_flat_state(state).leaves]


def test_a_module_with_attributes_of_these_names_is_left_alone() -> None:
    class Video(nnx.Module):
        kind, codec = "film", "h264"

    model = nnx.Sequential(Video(), jc.nn.ReLU())
    plan = jc.apply(model, ())
    assert [d.path for d in plan.decisions] == ["layers/1"]
    assert model.layers[0].codec == "h264"


@pytest.mark.parametrize("field", ["op", "path"])
def test_pattern_that_is_no_regular_expression_is_an_error(field: str) -> None:
    with pytest.raises(ValueError, match=rf"{field}='\('"):
        jc.Rule(TWO, **{field: "("})


def test_plan_prints_as_a_table() -> None:
    plan = jc.apply(Model(), (jc.Rule(jc.Packed(bits=1), op="relu"),))
    assert str(plan).splitlines() == [
        "path      op          codec",
        "blocks/0  dot         Exact()",
        "blocks/1  dot         Exact()",
        "blocks/2  dot         Exact()",
        "conv      conv        Exact()",
        "norm      batch_norm  Exact()",
        "pool      max_pool    Exact()",
        "relu      relu        Packed(bits=1)",
    ]
