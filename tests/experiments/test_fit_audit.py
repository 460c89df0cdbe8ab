"""The audit of `fit` names each defect of a plan; the recorded one has none."""

import pytest

from experiments.checks.fit_audit import TARGETS, defects, drawn
from experiments.tables.rows import load

# The seed, targets and number of blocks of each record, and how many of its steps are small.
RECORDS = {
    "fit-audit": (0, TARGETS, 2, 4),
    "fit-audit-gpu": (1, ["h100", "rtx4090"], 3, 0),
}
STEP = {"number": 0, "network": "vit", "target": "cpu", "all_choices": []}
CHOICES = [{"total_bytes": 80, "milliseconds": 1.0}]


def budget(budget, again, took=1.0):
    plan = None if again is None else {}
    return {"budget_bytes": budget, "bytes_again": again, "fastest_ms": took, "plan": plan}


@pytest.mark.parametrize(
    ("budgets", "choices", "defect"),
    [
        ([budget(90, 91)], [], "the plan needs 91"),
        ([budget(90, 60), budget(80, None), budget(70, 61)], [], "the peak rises from 60 to 61"),
        ([budget(90, 60, 1.03)], CHOICES, "1.030 ms, but 1.000 ms fit"),
        ([budget(90, None)], CHOICES, "nothing found, but 1.000 ms fit"),
        ([budget(90, 60, 1.01), budget(79, 60, 9.0), budget(40, None)], CHOICES, None),
    ],
)
def test_each_defect_is_named(budgets, choices, defect):
    found = defects(STEP | {"budgets": budgets, "all_choices": choices})
    assert len(found) == (defect is not None)
    assert all(defect in text for text in found)


def test_a_step_is_drawn_from_its_seed_of_what_is_asked_for():
    steps = [drawn(k, 0, ["h100", "a100"], depth=4, small=k < 2) for k in range(9)]
    assert steps == [drawn(k, 0, ["h100", "a100"], depth=4, small=k < 2) for k in range(9)]
    assert {step["target"] for step in steps} == {"h100", "a100"}
    assert {step["depth"] for step in steps} == {4} and len({s["network"] for s in steps}) == 5
    assert [step["actions"] == ["keep", "quantize", "recompute"] for step in steps[:3]] == [
        *(True, True, False)
    ]


@pytest.mark.parametrize("record", RECORDS)
def test_the_record_has_no_defects_and_is_of_the_steps_that_are_drawn(record):
    seed, targets, depth, small = RECORDS[record]
    steps = load(f"{record}/fit_audit.json")["steps"]
    for step in steps:
        number = step["number"]
        assert defects(step) == []
        assert drawn(number, seed, targets, depth, number < small).items() <= step.items()
    assert steps
