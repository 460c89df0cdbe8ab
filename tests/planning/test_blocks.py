"""Exact plans that recompute some of the blocks."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxcomp as jc
from jaxcomp.planning import DoesNotFitError, FittedPlan, Strategy, fit
from jaxcomp.planning._blocks import FirstBlocks, Level, first_blocks
from jaxcomp.planning._improve import improve
from jaxcomp.planning._search import Candidate
from tests.planning.small import BATCH, WIDTH, step_of

PLAIN, WEIGHTS, REMAT = Level(900.0, 1.0), Level(500.0, 1.2), Level(100.0, 2.0)
QUARTERS = [0.25] * 4


def plans(**kwargs):
    given = {"shares": QUARTERS, "plain": PLAIN, "remat": REMAT, "weights": WEIGHTS}
    return FirstBlocks(1, **(given | kwargs))


@pytest.mark.parametrize(
    ("budget", "spec", "seconds"),
    [
        (900, "plain", 1.0),
        (899, "remat:weights:1", 1.05),
        (500, "remat:weights", 1.2),
        (499, "remat:1+weights:3", 1.4),
        (300, "remat:2+weights:2", 1.6),
        (100, "remat", 2.0),
    ],
)
def test_the_fastest_that_fits_is_proposed(budget, spec, seconds):
    assert plans().propose(budget) == (pytest.approx(seconds), spec)


def test_nothing_is_proposed_below_the_least_or_twice():
    assert plans().propose(99) is None
    tried = ["plain", "remat", "remat:weights"]
    assert plans(tried=tried, shares=[1.0]).propose(900) is None


def test_products_are_kept_only_where_that_pays():
    slow = Level(500.0, 2.5)
    assert plans(weights=slow).propose(700)[1] == "remat:1"
    assert plans(weights=None).propose(500)[1] == "remat:2"


def test_blocks_count_by_what_they_save():
    assert plans(weights=None, shares=[0.6, 0.2, 0.1, 0.1]).propose(420)[1] == "remat:1"
    assert plans(weights=None, shares=[0.1, 0.1, 0.2, 0.6]).propose(580)[1] == "remat:3"


def test_a_plan_that_does_not_fit_corrects_the_estimate():
    blocks = plans(weights=None, tried=["plain", "remat"])
    compiled = []

    def compile_plan(spec, micro_batches):
        compiled.append(spec)
        recomputed = int(spec.removeprefix("remat:"))
        report = SimpleNamespace(total_bytes=945 - 200 * recomputed)
        return SimpleNamespace(report=report, seconds=1.0 + 0.25 * recomputed)

    errors = improve([blocks], 500, compile_plan, lambda: 3, lambda: 3.0)
    assert compiled == ["remat:2", "remat:3"]
    assert errors[0] == pytest.approx(-45 / 545)


def test_a_kind_that_fails_or_fills_the_budget_ends_no_other():
    without_weights = [plans(weights=None, plain=Level(900.0, seconds)) for seconds in (0.9, 1.0)]
    compiled = []

    def compile_plan(spec, micro_batches):
        compiled.append(spec)
        if spec == "remat:weights":
            return None
        return SimpleNamespace(report=SimpleNamespace(total_bytes=500), seconds=1.6)

    improve([plans(), *without_weights], 500, compile_plan, lambda: 3, lambda: 3.0)
    assert compiled == ["remat:weights", "remat:2", "remat:2"]


def test_micro_batches_are_split_further_and_less():
    """Four were compiled, and take 0.6 s and 50 bytes more than a quarter of the plain step's."""
    found = [
        candidate("plain", PLAIN),
        candidate("remat", REMAT),
        candidate("accumulate:4", Level(50 + 100 + 200.0, 1.6)),
    ]
    plain, recomputed, _ = (c.result for c in found)
    one, two, four = first_blocks(found, plain, recomputed, QUARTERS)
    assert [kind.micro_batches for kind in (one, two, four)] == [1, 2, 4]
    assert one.propose(900) == (pytest.approx(1.25), "remat:1")
    assert four.plain == Level(350.0, 1.6)
    assert (four.remat.bytes, four.remat.seconds) == pytest.approx((150.0, 2.6))
    assert (two.plain.bytes, two.plain.seconds) == pytest.approx((550.0, 1.2))
    assert (two.remat.bytes, two.remat.seconds) == pytest.approx((150.0, 2.2))
    assert two.propose(450) == (pytest.approx(1.45), "remat:1")
    assert two.propose(550)[1] == "remat:1"


def candidate(spec, level):
    report = SimpleNamespace(total_bytes=level.bytes, argument_bytes=100)
    result = SimpleNamespace(report=report, seconds=level.seconds, moments=("backward",))
    return Candidate(spec, Strategy.parse(spec), result)


def of_coded_layers(transform, batch):
    """A step of six blocks with layers of `jaxcomp.nn`."""

    def block():
        up, down = (jc.nn.Linear(*shape, rngs=nnx.Rngs(0)) for shape in ((64, 256), (256, 64)))
        return nnx.Sequential(up, jnp.sin, down)

    model = transform(nnx.eval_shape(lambda: nnx.Sequential(*(block() for _ in range(6)))))
    return step_of(transform, model), (model, jax.ShapeDtypeStruct((batch, WIDTH), jnp.float32))


def test_some_blocks_are_recomputed():
    given = {"batch": BATCH, "target": "cpu"}
    exact = {"actions": ("keep", "recompute")}
    plain = fit(of_coded_layers, budget="1GiB", **given).total_bytes
    budget = int(0.8 * plain)
    plan = fit(of_coded_layers, budget=budget, **given, **exact)
    assert {point.name for point in plan.frontier} >= {"plain", "remat", "remat:weights"}
    assert plan.spec == plan.name
    assert plan.strategy.first_blocks is not None
    first, others = plan.strategy.first_blocks
    shown = {part.group: part.action for part in plan.parts}
    expected = ["remat"] * first + ["remat:weights"] * others + ["keep"] * (6 - first - others)
    assert [shown[f"layers/{i}"] for i in range(6)] == expected
    assert FittedPlan.from_json(plan.to_json()).strategy == Strategy.parse(plan.spec)
    assert plan.verify(of_coded_layers).total_bytes == plan.total_bytes <= budget
    with pytest.raises(DoesNotFitError):
        fit(of_coded_layers, budget=budget, **given, **exact, pin={"layers/0": "keep"})
