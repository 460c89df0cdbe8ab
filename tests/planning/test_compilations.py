"""What a plan compiles and runs: offloaded, at once, on the device."""

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxcomp.memory._targets import resolve
from jaxcomp.planning import DoesNotFitError, fit
from tests.planning.small import (
    BATCH,
    make_step,
    of_linen,
    plain_bytes,
)


@pytest.mark.aot
def test_values_are_offloaded_where_nothing_else_fits(capsys):
    pytest.importorskip("jax_cuda13_plugin")
    make = functools.partial(make_step, depth=6)
    actions = ("quantize", "offload")
    plan = fit(make, batch=16384, target="h100", budget="57MiB", actions=actions, bits=(8,))
    with capsys.disabled():
        print(f"\n{plan}")
    actions = {part.action for part in plan.parts}
    assert "offload:bits=8" in actions | {plan.name}
    report = plan.verify(make)
    assert plan.total_bytes == report.total_bytes <= plan.budget_bytes
    link = report.host_traffic_bytes / resolve("h100").link_bandwidth
    assert 1e3 * link < plan.milliseconds


@pytest.mark.slow
def test_the_fastest_of_what_was_run_is_chosen(monkeypatch):
    budget = int(0.6 * plain_bytes())
    given = {"batch": BATCH, "target": "cpu", "budget": budget, "actions": ("keep", "quantize")}
    plan = fit(make_step, calibrate=True, **given)
    timed = {c.name: c.measured_milliseconds for c in plan.frontier if c.measured_milliseconds}
    assert 2 <= len(timed) <= 3
    assert timed[plan.name] == min(timed.values()) > 0
    monkeypatch.setattr(
        "jaxcomp.planning._search.measured_seconds",
        lambda make_step, strategy, batch: 1.0 if _is_uniform(strategy) else 2.0,
    )
    assert fit(make_step, calibrate=True, **given).name == "bits=4"


def _is_uniform(strategy):
    return not any(rule.path for rule in strategy.policy.rules)


@pytest.mark.aot
def test_steps_for_an_absent_target_are_compiled_at_once(monkeypatch):
    pytest.importorskip("jax_cuda13_plugin")
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    at_once = []

    class Pool(ThreadPoolExecutor):
        def submit(self, *args):
            at_once.append(args[0].__name__)
            return super().submit(*args)

    monkeypatch.setattr("jaxcomp.planning._search.ThreadPoolExecutor", Pool)
    make = functools.partial(make_step, depth=3)
    plan = fit(make, batch=8192, target="h100", budget="40MiB", bits=(4,), compiles=4)
    assert at_once == ["_probe", "_probe"]
    assert {"bits=4", "remat"} <= {c.name for c in plan.frontier}


@pytest.mark.aot
def test_what_cannot_be_traced_at_once_is_told_in_its_turn(monkeypatch):
    """A function whose blocks are not recomputed has no `remat`."""
    pytest.importorskip("jax_cuda13_plugin")
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    with pytest.raises(DoesNotFitError, match="remat failed: ValueError: make_step is expected to"):
        fit(of_linen, batch=BATCH, target="h100", budget="3MiB", bits=(4,), compiles=3)


def test_offloading_needs_a_known_link():
    with pytest.raises(DoesNotFitError, match="no offload: the bandwidth between cpu and its host"):
        fit(make_step, batch=BATCH, budget="1.2MiB", target="cpu", actions=("offload",))
