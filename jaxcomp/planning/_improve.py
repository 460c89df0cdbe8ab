"""Solves for plans, compiles them, corrects the estimates, and solves again."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from jaxcomp.planning._groups import bits_of
from jaxcomp.planning._probe import Probe
from jaxcomp.planning._solver import Problem, solve

_SLACK = 0.015  # of the budget: less is not worth another compilation
_MARGIN = 0.002  # of the budget, after a plan that did not fit
_BITS = (4, 3, 2)  # fewer are used only where there is no other way

Assignment = Mapping[str, str]
Compile = Callable[[Assignment, int], Probe | None]


@dataclasses.dataclass
class Variant:
    """The plans with some number of micro-batches.

    Attributes:
        micro_batches: Their number.
        problem: What is decided.
        more_bytes: What a compiled step takes beyond the estimate.
        more_seconds: The same of its estimated time.
    """

    micro_batches: int
    problem: Problem
    more_bytes: float = 0.0
    more_seconds: float = 0.0
    tried: list[Assignment] = dataclasses.field(default_factory=list)

    def propose(self, budget: float, least: int) -> tuple[float, Assignment] | None:
        """The fastest choices of so many bits or more, and their estimated time."""
        choices = {
            group: {
                name: choice
                for name, choice in named.items()
                if (bits_of(name) or least) >= least or len(named) == 1
            }
            for group, named in self.problem.choices.items()
        }
        if not all(choices.values()):
            return None
        problem = dataclasses.replace(self.problem, choices=choices)
        found = solve(problem, budget - self.more_bytes)
        if found is None:
            return None
        return self.problem.seconds(found) + self.more_seconds, found

    def learn(self, assignment: Assignment, result: Probe, budget: float) -> float:
        """Corrects the estimates by a compiled plan; the error of its bytes, as a fraction."""
        total = result.report.total_bytes
        assert total is not None
        self.tried.append(assignment)
        expected, _ = self.problem.peak(assignment)
        error = (expected + self.more_bytes - total) / total
        self.more_bytes = total - expected + (_MARGIN * budget if total > budget else 0.0)
        self.more_seconds = result.seconds - self.problem.seconds(assignment)
        return error


def improve(
    variants: Sequence[Variant],
    budget: float,
    compile_plan: Compile,
    left: Callable[[], int],
    best_seconds: Callable[[], float],
) -> list[float]:
    """Compiles plans as long as one is estimated to be faster than all that fit.

    Args:
        variants: The plans to choose from.
        budget: In bytes.
        compile_plan: Compiles the choices for each group, with a number of micro-batches; None if
            that fails.
        left: How many more may be compiled.
        best_seconds: The least estimated time of what was compiled and fits.

    Returns:
        The error of the estimated bytes of each plan.
    """
    errors: list[float] = []
    while left():
        best = best_seconds()
        proposed = _proposed(variants, budget, best < math.inf)
        if proposed is None:
            break
        seconds, assignment, variant = proposed
        if seconds >= best:
            break
        result = compile_plan(assignment, variant.micro_batches)
        if result is None or result.report.total_bytes is None:
            break
        errors.append(variant.learn(assignment, result, budget))
        for other in variants:  # of the same micro-batches, whose time is as far off
            if other.micro_batches == variant.micro_batches and not other.tried:
                other.more_seconds = variant.more_seconds
        is_full = (1 - _SLACK) * budget < result.report.total_bytes <= budget
        if is_full and result.seconds < best:
            break
    return errors


def _proposed(
    variants: Sequence[Variant], budget: float, something_fits: bool
) -> tuple[float, Assignment, Variant] | None:
    """The fastest new plan, of the most bits with which there is one that may fit."""
    for least in _BITS[:1] if something_fits else _BITS:
        found = [
            (*proposal, variant)
            for variant in variants
            if (proposal := variant.propose(budget, least)) is not None
        ]
        if found:
            new = [item for item in found if item[1] not in item[2].tried]
            return min(new, key=lambda item: item[0], default=None)
    return None
