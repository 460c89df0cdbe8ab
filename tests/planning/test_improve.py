"""Plans that are compiled one after the other, against a compiler that is made up."""

import contextlib
import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np

from jaxcomp.planning import _plans
from jaxcomp.planning._improve import Variant, _pass_on, improve
from jaxcomp.planning._search import Candidate, Search
from jaxcomp.planning._solver import Choice, Moment, Problem
from jaxcomp.planning._strategies import Strategy

MIB = 2**20


def problem(seconds):
    """One group, which has to be encoded to fit 2 MiB."""
    choices = {"a": {"keep": Choice(4 * MIB, 0.0), "bits=4": Choice(MIB, seconds)}}
    return Problem(choices, [Moment("backward", MIB, {"a": 1.0})], {})


def test_a_slow_plan_corrects_all_plans_of_as_many_micro_batches_and_ends_nothing():
    whole = Variant(1, problem(2.0))
    split = [Variant(2, problem(1.0)), Variant(2, problem(1.1))]
    compiled = []

    def compile_plan(assignment, micro_batches):
        compiled.append(micro_batches)
        return made_up(2.5 if micro_batches == 1 else 5.0)

    def best_seconds():
        return 2.5 if 1 in compiled else 3.0

    errors = improve([whole, *split], 2 * MIB, compile_plan, lambda: 3, best_seconds)
    assert compiled == [2, 1]
    assert errors == [0.0, 0.0]


def test_micro_batches_are_doubled_as_long_as_they_may_be_the_fastest_that_fits(monkeypatch):
    seconds = {"accumulate:2": 3.0, "accumulate:4": 2.0, "accumulate:8": 4.0, "accumulate:16": 1.0}
    total: dict[str, int] = {}
    progress = contextlib.nullcontext
    search = Search(None, 64, None, 4 * MIB, 8, progress, None, lambda strategy: True)

    def compile_strategy(search, name, strategy):
        result = made_up(seconds[name], total.get(name, 2 * MIB))
        search.found.append(Candidate(name, strategy, result))
        return result

    monkeypatch.setattr(_plans, "_tried", compile_strategy)
    _plans._accumulate(search, made_up(3.0))
    names = [candidate.name for candidate in search.found]
    assert names == ["accumulate:2", "accumulate:4", "accumulate:8"]
    search.found.clear()
    _plans._accumulate(search, made_up(2.9))
    assert [candidate.name for candidate in search.found] == ["accumulate:2"]
    total["accumulate:2"] = 5 * MIB  # does not fit, and 4 are expected to take 3.2
    for other, names in ((3.0, ["accumulate:2"]), (3.3, [*seconds][:3])):
        search.found[:] = [Candidate("remat", Strategy.parse("remat"), made_up(other))]
        _plans._accumulate(search, made_up(2.9, 5 * MIB))
        assert [candidate.name for candidate in search.found[1:]] == names


def test_a_plan_that_nearly_fits_is_worth_the_compilations_that_are_left_over():
    progress = contextlib.nullcontext
    search = Search(None, 64, None, 4 * MIB, 8, progress, None, lambda strategy: True)
    strategy = Strategy.parse("quantize:bits=4")
    for total, assignment, nearly in (
        (4.1, None, False),  # all values alike: there is nothing to correct
        (4.2, {"": "bits=4"}, False),
        (4.1, {"": "bits=4"}, True),
        (4.0, None, True),
    ):
        search.found[:] = [Candidate("", strategy, made_up(1.0, int(total * MIB)), assignment)]
        assert _plans._nearly_fits(search) == nearly


def made_up(seconds, total=2 * MIB, seconds_of=None):
    report = SimpleNamespace(total_bytes=total, argument_bytes=MIB)
    return SimpleNamespace(
        report=report,
        seconds=seconds,
        moments=("backward",),
        seconds_of=seconds_of or {},
    )


def test_groups_that_are_alike_follow_what_was_compiled_of_some():
    groups = ["blocks/0/attention", "blocks/1/attention", "head"]
    choices = {g: {"keep": Choice(4 * MIB, 2.0), "bits=4": Choice(MIB, 3.0)} for g in groups}
    problem = Problem(choices, [Moment("backward", MIB, dict.fromkeys(groups, 1.0))], {})
    plan = {"blocks/0/attention": "keep", "blocks/1/attention": "bits=4", "head": "keep"}
    seconds_of = dict(zip(groups, [3.0, 3.3, 4.0], strict=True))
    whole, split = Variant(1, problem), Variant(2, problem)
    whole.learn(plan, made_up(10.3, 15 * MIB, seconds_of), 20 * MIB)
    _pass_on(whole, split)
    for plans in (whole, split):
        for group in groups[:2]:
            found = [choice.seconds for choice in plans.problem.choices[group].values()]
            np.testing.assert_allclose(found, [3.0, 3.3], rtol=1e-12)
        assert plans.problem.choices["head"] == choices["head"]
    assert whole.problem.peak(plan)[0] + whole.more_bytes == 15 * MIB
    np.testing.assert_allclose(whole.problem.seconds(plan) + whole.more_seconds, 10.3, rtol=1e-12)
    adjacent = Variant(1, dataclasses.replace(problem, neighbours=[tuple(groups[:2])]))
    adjacent.learn(plan, made_up(10.3, 15 * MIB, seconds_of), 20 * MIB)
    assert adjacent.problem.choices == choices  # their choices differ, which may take the time


def test_the_first_error_is_put_down_to_neighbours_whose_choices_differ():
    groups = [f"blocks/{i}" for i in range(6)]
    seconds = {group: 1.0 + 0.01 * (i % 2) for i, group in enumerate(groups)}
    choices = {
        group: {"keep": Choice(4 * MIB, 0.0), "bits=4": Choice(MIB, seconds[group])}
        for group in groups
    }
    moments = [Moment("backward", MIB, dict.fromkeys(groups, 1.0))]
    neighbours = list(itertools.pairwise(groups))
    plans = Variant(1, Problem(choices, moments, {}, neighbours=neighbours))
    compiled = []

    def compile_plan(assignment, _):
        count = sum(assignment[a] != assignment[b] for a, b in neighbours)
        compiled.append(count)
        chosen = {group: choices[group][name] for group, name in assignment.items()}
        seconds_of = {group: choice.seconds for group, choice in chosen.items()}
        total, spent = MIB + sum(c.bytes for c in chosen.values()), sum(seconds_of.values())
        return made_up(spent + 0.5 * count, total + MIB * count, seconds_of)

    errors = improve([plans], 17.5 * MIB, compile_plan, lambda: 3, lambda: 10.0)
    assert compiled[0] == 5
    assert compiled[1] == 1
    assert errors[0] < -0.2
    assert abs(errors[1]) < 0.003
