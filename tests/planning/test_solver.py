"""The integer program, beside all assignments of small problems."""

import itertools

import numpy as np
import pytest

from jaxcomp.planning._solver import FREE, Choice, Moment, Problem, solve

MIB = 2**20
GROUPS = [f"blocks/{i // 2}/{i % 2}" for i in range(6)]
NEIGHBOURS = list(itertools.pairwise(GROUPS))


def _problem(rng):
    names = ["keep", "code", "recompute"]
    choices = {
        group: {
            name: Choice(rng.uniform(0, 10) * MIB, rng.uniform())
            for name in names[: rng.integers(1, 4)]
        }
        for group in GROUPS
    }
    pairs = [GROUPS[i : i + 2] for i in range(0, 6, 2)]
    free = [pair for pair in pairs if all("recompute" in choices[group] for group in pair)]
    for group in GROUPS:
        if not any(group in pair for pair in free):
            choices[group].pop("recompute", None)
    moments = [
        Moment(
            str(i),
            rng.uniform(0, 5) * MIB,
            {g: rng.uniform() for g in GROUPS if rng.uniform() < 0.7},
            group,
            [name for name in choices[group] if rng.uniform() < 0.5],
        )
        for i, group in enumerate([*GROUPS[:3], GROUPS[0]])
    ]
    boundary = Choice(rng.uniform(0, 2) * MIB, rng.uniform(0, 0.5)) if rng.uniform() < 0.7 else FREE
    return Problem(choices, moments, {"recompute": free}, np.inf, NEIGHBOURS, boundary)


def _allowed(problem, assignment):
    return all(
        len({assignment[group] == "recompute" for group in pair}) == 1
        for pair in problem.together["recompute"]
    )


@pytest.mark.parametrize("seed", range(25))
def test_no_assignment_within_the_budget_takes_less_time(seed):
    rng = np.random.default_rng(seed)
    problem = _problem(rng)
    groups = list(problem.choices)
    tried = [
        assignment
        for names in itertools.product(*problem.choices.values())
        if _allowed(problem, assignment := dict(zip(groups, names, strict=True)))
    ]
    for budget in MIB * rng.uniform(0, 40, 4):
        within = [a for a in tried if problem.peak(a)[0] <= budget]
        found = solve(problem, budget)
        if not within:
            assert found is None
            continue
        least = min(map(problem.seconds, within))
        assert _allowed(problem, found)
        assert problem.peak(found)[0] <= budget * (1 + 1e-6)
        assert problem.seconds(found) <= least + 2e-3 * abs(least)
