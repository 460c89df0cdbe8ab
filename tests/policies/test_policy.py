"""Policies are plain data; what their rules match."""

import json
import pickle

import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp as jc
from jaxcomp.policies import Value, from_spec
from tests.helpers import without_type_checks

TWO = jc.Quantize(bits=2)
POLICIES = [
    jc.Policy(()),
    jc.recipes.fused(bits=3, scale_source="range"),
    jc.recipes.transformer(bits=2),
    jc.recipes.boundary(jc.Cast("float8_e4m3fn")),
    jc.recipes.division().offloaded(),
    jc.recipes.pruning(block=(8, 16), rest_bits=4),
    jc.Policy((jc.Rule(jc.PerSample((4, 2)), op="conv"), jc.Rule("offload", names=("a", "b")))),
    from_spec("pooling:window=4 @ blocks/[01]/.* + pooling:window=2"),
]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_is_plain_data(policy):
    again = jc.Policy.from_json(policy.to_json())
    assert again == policy
    assert hash(again) == hash(policy)
    assert pickle.loads(pickle.dumps(policy)) == policy
    names = {name: getattr(jc, name) for name in dir(jc)}
    assert eval(repr(policy), names) == policy
    assert len(str(policy).splitlines()) == 1 + len(policy.rules) + policy.lossy_recomputation


def test_policies_are_joined_in_order():
    first, second = jc.recipes.fused(2), jc.recipes.boundary(TWO)
    both = first + second
    assert both.rules == (*first.rules, *second.rules)
    assert both.lossy_recomputation
    with pytest.raises(TypeError):
        first + TWO


def test_a_codec_of_ones_own_in_json():
    class Quarter(jc.Cast):
        name = "quarter"

    policy = jc.Policy((jc.Rule(Quarter("float8_e5m2"), op="conv"),))
    assert jc.Policy.from_json(policy.to_json()) == policy


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.update(version=2), "version 2, expected 1"),
        (lambda content: content.pop("rules"), "KeyError"),
        (lambda content: content["rules"][0].update(sizes=3), "unknown fields of a rule"),
        (lambda content: content["rules"][0]["action"].update(name="zip"), "codec='zip'"),
        (lambda content: content["rules"][0]["action"].update(bits=7), "bits=7"),
        (lambda content: content["rules"][0].update(path="("), "not a regular expression"),
    ],
)
def test_json_of_another_kind_is_an_error(change, message):
    content = json.loads(jc.recipes.everywhere(TWO).to_json())
    change(content)
    with pytest.raises(ValueError, match=r"text: expected JSON of Policy\.to_json") as error:
        jc.Policy.from_json(json.dumps(content))
    assert message in str(error.value)


@pytest.mark.parametrize(
    "text", ["", "[]", "3", '"fused"', "{", "[" * 10**5, "1" * 10**5, " " * 2**21]
)
def test_text_that_is_no_policy_is_an_error(text):
    with pytest.raises(ValueError, match=r"text: expected JSON of Policy\.to_json"):
        jc.Policy.from_json(text)


def test_a_rule_matches_a_value_that_meets_all_conditions():
    value = Value((8, 64), jnp.float32, "dot_general", ("q", "k"), "operand", "", "blocks/0")
    conditions = {
        "path": ("blocks/.*", "blocks"),
        "names": (("k", "v"), ("v",)),
        "primitives": (("dot_general",), ("sin",)),
        "roles": (("operand", "mask"), ("mask",)),
        "dtypes": (("float32",), ("bfloat16",)),
        "min_size": (512, 513),
    }
    for field, (fits, does_not) in conditions.items():
        assert jc.Rule(TWO, **{field: fits}).matches_value(value)
        assert not jc.Rule(TWO, **{field: does_not}).matches_value(value)
    assert jc.Rule(TWO).matches_value(value)
    assert not jc.Rule(TWO, op="conv").matches_value(value)
    statistic = Value((8, 1), jnp.float32, role="statistic")
    assert not jc.Rule(TWO).matches_value(statistic)
    assert jc.Rule(TWO, roles=("statistic",)).matches_value(statistic)
    index = Value((8, 1), jnp.int32, names=("i",), role="index")
    assert not jc.Rule(TWO).matches_value(index)
    assert jc.Rule("keep").matches_value(index)
    assert jc.Rule(TWO, names=("i",)).matches_value(index)  # an error, once it is traced


def test_a_rule_matches_layers_that_can_save_by_its_codec():
    assert jc.Rule(TWO).matches_layer("conv1", "conv")
    assert not jc.Rule(TWO).matches_layer("relu1", "relu")
    assert jc.Rule(TWO, op="relu").matches_layer("relu1", "relu")  # an error, once it is applied
    assert jc.Rule("keep").matches_layer("relu1", "relu")
    assert not jc.Rule("recompute").matches_layer("conv1", "conv")
    assert not jc.Rule(TWO, roles=("operand",)).matches_layer("conv1", "conv")
    assert not jc.Rule(TWO, path="conv").matches_layer("conv1", "conv")


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"action": "quantize:bits=2"}, ValueError, "action='quantize:bits=2': expected a codec"),
        ({"action": 4}, TypeError, "action=4: expected a codec such as"),
        ({"action": jc.Quantize}, TypeError, "expected a codec such as"),
        ({"path": "("}, ValueError, r"path='\(': not a regular expression"),
        ({"op": "["}, ValueError, r"op='\[': not a regular expression"),
        ({"path": "([a-z_]+)*!"}, ValueError, "a repeated group has a repeat or alternatives"),
        ({"path": "((a|b)c)+?"}, ValueError, "a repeated group has a repeat or alternatives"),
        ({"path": ".*" * 9}, ValueError, "expected 8 repeats at most"),
        ({"path": "(" * 500}, ValueError, "not a regular expression"),
        ({"path": "a" * 1001}, ValueError, "path: 1,001 characters, expected 1,000 at most"),
        ({"path": 3}, TypeError, "path=3: expected a regular expression"),
        ({"names": "hidden"}, TypeError, "names='hidden': expected a tuple of strings"),
        ({"roles": ("weights",)}, ValueError, "roles=.*'weights'.* not among"),
        ({"min_size": "3"}, TypeError, "min_size='3': expected a number"),
        ({"required": 1}, TypeError, "required=1: expected True or False"),
        ({"op": "conv", "names": ("q",)}, ValueError, "op='conv': expected no names"),
        ({"op": "conv", "min_size": 4}, ValueError, "op='conv': expected no names"),
        ({"op": "conv", "action": "recompute"}, ValueError, "action='recompute': expected a codec"),
        ({"action": "open"}, ValueError, "action='open': expected op='checkpoint' beside it"),
        (
            {"op": "checkpoint", "action": "offload"},
            ValueError,
            "'offload': expected 'open', 'keep'",
        ),
    ],
)
def test_rules_that_make_no_sense_are_refused(kwargs, error, message):
    with without_type_checks(), pytest.raises(error, match=message):
        jc.Rule(**({"action": TWO} | kwargs))


def test_policies_that_make_no_sense_are_refused():
    rule = jc.Rule(TWO, op="dot")
    with without_type_checks():
        for wrong in ("quantize:bits=2", rule, [TWO], (r for r in [rule])):
            with pytest.raises(TypeError, match="expected a tuple of Rule"):
                jc.Policy(wrong)
        with pytest.raises(TypeError, match="lossy_recomputation=1: expected True or False"):
            jc.Policy((rule,), 1)
    with pytest.raises(ValueError, match="path='b': expected rules without a path"):
        jc.recipes.fused().at("a").at("b")


def test_patterns_of_everyday_use_are_allowed():
    for pattern in (
        r"(blocks/)?[0-9*+]+/.*",
        r"(?:a|b)/\d{1,3}(c|d)?",
        r"a\)*",
        "[(|)*]+",
        "(ab)*/c",
    ):
        assert jc.Rule(TWO, path=pattern).path == pattern


def test_numpy_integers_are_integers():
    four, two = np.int64(4), np.int32(2)
    with without_type_checks():
        for made, expected in (
            (jc.Quantize(four), jc.Quantize(4)),
            (jc.SignAware(four), jc.SignAware(4)),
            (jc.AvgPool(two), jc.AvgPool(2)),
            (jc.DualPrecision(four, two), jc.DualPrecision(4, 2)),
            (jc.Packed(four), jc.Packed(4)),
            (jc.PerSample((four, two)), jc.PerSample((4, 2))),
            (jc.Float8(axis=np.int8(-1)), jc.Float8(axis=-1)),
            (jc.BlockSparse(block=four), jc.BlockSparse(block=4)),
            (jc.Rule(TWO, min_size=four), jc.Rule(TWO, min_size=4)),
        ):
            assert repr(made) == repr(expected)


def test_seeds_of_any_size():
    x = jnp.linspace(0.0, 1.0, 999)[None]
    codes = [TWO.encode(x, seed) for seed in (1, 2**31, 2**32 + 1, -(2**70))]
    drawn = {TWO.decode(code).tobytes() for code in codes}
    assert len(drawn) == 4
    jc.checkpoint(jnp.sin, TWO, seed=2**40)
