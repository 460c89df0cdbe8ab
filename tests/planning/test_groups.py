"""Groups of a plan, and the policy that choices for them make."""

import pytest
from flax import nnx

import jaxcomp as jc
from jaxcomp.memory._targets import resolve
from jaxcomp.planning import fit
from jaxcomp.planning._groups import Groups, pattern_of, policy_of
from jaxcomp.planning._probe import Probe
from jaxcomp.planning._problem import Known, make_problem
from jaxcomp.planning._solver import Moment, solve
from tests.planning.small import BATCH, Net, make_step, of_linen, total_bytes


def test_groups_and_their_patterns():
    groups = Groups.of([nnx.eval_shape(lambda: Net(12, nnx.Rngs(0)))], None)
    assert groups.group_of("blocks/11/mlp/layers/0") == "blocks/11/mlp"
    assert groups.group_of("blocks/3/norm") == "blocks/3"
    assert groups.group_in("jit/Net/blocks/10/mlp/layers/2/dot") == "blocks/10/mlp"
    assert groups.group_in("vmap/other") == ""
    assert pattern_of(["blocks/10/mlp", "blocks/2/mlp"]) == "(blocks/(2|10))/mlp"
    assert pattern_of(["head", "a.b"]) == r"(a\.b|head)"
    policy = policy_of({"blocks/0": "keep", "blocks/0/mlp": "bits=4", "": "keep"}, False)
    paths = list(dict.fromkeys(rule.path for rule in policy.rules))
    assert paths == ["(blocks/(0))/mlp(/.*)?", "(blocks/(0))(?!(/mlp)(/|$))(/.*)?", "()", ""]


def test_scopes_that_only_codes_have_belong_to_the_outer_one():
    scopes = Groups(frozenset({"MLP", "MLP/first"}), of_scopes=True)
    paths = ["MLP/first/act", "MLP/second", "MLP", "other/inner"]
    assert [scopes.group_of(path) for path in paths] == ["MLP/first", "MLP", "MLP", "other"]


def test_what_is_kept_leaves_operations_of_other_groups():
    """An attention in a block that is kept, or beside what no module computes, is still coded."""
    inner = ["Net/blocks_0/attn", "Net/blocks_1/attn"]
    outer = ["", "Net", "Net/head", "Net/blocks_0", "Net/blocks_1"]
    policy = policy_of(dict.fromkeys(outer, "keep") | dict.fromkeys(inner, "bits=4"), False)

    def is_kept(path):
        found = (r for r in policy.rules if r.op and r.matches_layer(path, "attention"))
        return next((rule.action == "keep" for rule in found), False)

    assert not any(map(is_kept, [*inner, "Net/blocks_1/attn/scores", "other"]))
    assert all(map(is_kept, [*outer, "Net/blocks_1/mlp", "Net/blocks_1/attn_norm"]))


def test_groups_of_a_linen_model_are_its_scopes():
    step, arguments = of_linen(jc.planning.Strategy.parse("plain"), BATCH)
    plain = jc.memory.analyze(step, *arguments, target="cpu").total_bytes
    given = {"batch": BATCH, "budget": int(0.7 * plain), "target": "cpu", "bits": (8,)}
    given["compiles"] = 4
    plan = fit(of_linen, actions=("keep", "quantize"), **given)
    actions = {part.group: part.action for part in plan.parts}
    assert {"LinenNet", "LinenNet/up_0", "LinenNet/norm_2"} <= actions.keys()
    assert "bits=8" in actions.values() and set(actions.values()) <= {"keep", "bits=8"}
    assert plan.verify(of_linen).total_bytes == plan.total_bytes


@pytest.mark.slow
def test_groups_of_a_linen_model_may_be_pinned():
    step, arguments = of_linen(jc.planning.Strategy.parse("plain"), BATCH)
    plain = jc.memory.analyze(step, *arguments, target="cpu").total_bytes
    given = {"batch": BATCH, "budget": int(0.7 * plain), "target": "cpu", "bits": (8,)}
    plan = fit(of_linen, pin={"LinenNet/up_.*": "bits=8"}, compiles=4, **given)
    assert {p.action for p in plan.parts if "up_" in p.group} == {"bits=8"}


def test_recomputed_blocks_start_from_what_they_keep():
    totals = {}
    for number in (0, 4):
        choice = {f"blocks/{i}": "recompute" if i < number else "keep" for i in range(4)}
        choice |= {f"{block}/mlp": what for block, what in choice.items()}
        policy = policy_of(choice | {"head": "keep", "": "keep"}, False)
        totals[number] = total_bytes(jc.planning.Strategy.of(policy), depth=4)
    assert totals[4] < 0.7 * totals[0]


def test_what_is_kept_is_estimated_where_the_plain_step_is_rejected():
    step, arguments = make_step(jc.planning.Strategy.parse("plain"), 8)
    report = jc.memory.analyze(step, *arguments, target="cpu")
    rejected = Probe(report, 2.0, {"a": 1000}, {}, {}, ())
    moments = (Moment("backward pass", 10.0, {"a": 1.0}),)
    coded = Probe(report, 1.0, {"a": 100}, {"a": 110}, {"a": 1.0}, moments)
    known = Known(rejected, {4: coded}, False, {2: {"a": 50}}, None, True)
    choices = make_problem(known, {}, resolve("cpu")).choices["a"]
    pinned = make_problem(known, {"a": "bits=2"}, resolve("cpu")).choices["a"]
    assert choices["keep"].bytes == pytest.approx(1100)
    assert pinned["bits=2"].bytes == pytest.approx(55)
    assert choices["keep"].seconds == 1.0
    assert set(choices) == {"keep", "bits=4"}


def test_fewer_bits_are_for_as_few_groups_as_the_budget_asks_for():
    step, arguments = make_step(jc.planning.Strategy.parse("plain"), 8)
    report = jc.memory.analyze(step, *arguments, target="cpu")
    blocks = [f"blocks/{i}" for i in range(4)]

    def probe(saved, seconds):
        sizes, times = dict.fromkeys(blocks, saved), dict.fromkeys(blocks, seconds)
        moments = (Moment("backward pass", 0.0, dict.fromkeys(blocks, 1.0)),)
        return Probe(report, 4 * seconds, sizes, sizes, times, moments)

    quantized = {4: probe(4 * 2**20, 2.0), 3: probe(3 * 2**20, 3.0)}  # 3 bits take longer
    known = Known(probe(16 * 2**20, 1.0), quantized, False, {}, None, True)
    found = solve(make_problem(known, {}, resolve("cpu")), 15 * 2**20)
    assert sorted(found.values()) == ["bits=3", "bits=4", "bits=4", "bits=4"]
