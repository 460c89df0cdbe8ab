"""Plans that are compiled one after the other, against a compiler that is made up."""

import contextlib
from types import SimpleNamespace

from jaxcomp.planning import _plans
from jaxcomp.planning._improve import Variant, improve
from jaxcomp.planning._search import Candidate, Search
from jaxcomp.planning._solver import Choice, Moment, Problem

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


def test_micro_batches_are_doubled_only_as_long_as_they_are_the_fastest_that_fits(monkeypatch):
    seconds = {"accumulate:2": 3.0, "accumulate:4": 2.0, "accumulate:8": 4.0, "accumulate:16": 1.0}
    progress = contextlib.nullcontext
    search = Search(None, 64, None, 4 * MIB, 8, progress, None, lambda strategy: True)

    def compile_strategy(search, name, strategy):
        result = made_up(seconds[name])
        search.found.append(Candidate(name, strategy, result))
        return result

    monkeypatch.setattr(_plans, "_tried", compile_strategy)
    _plans._accumulate(search, made_up(1.0))
    names = [candidate.name for candidate in search.found]
    assert names == ["accumulate:2", "accumulate:4", "accumulate:8"]


def made_up(seconds):
    report = SimpleNamespace(total_bytes=2 * MIB, argument_bytes=MIB)
    return SimpleNamespace(report=report, seconds=seconds, moments=("backward",))
