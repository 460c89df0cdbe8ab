"""Solves for plans, compiles them, corrects the estimates, and solves again."""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from jaxcomp.planning._corrections import Ratios, corrected, ratios_of
from jaxcomp.planning._probe import Probe
from jaxcomp.planning._solver import FREE, Choice, Problem, solve

_SLACK = 0.015  # of the budget: less is not worth another compilation
_MARGIN = 0.002  # of the budget, after a plan that did not fit
_FIRST = 1.03  # a first plan may be faster than estimated by so much

Assignment = Mapping[str, str]
Compile = Callable[[Any, int], Probe | None]


class Plans(Protocol):
    """Plans of a kind, one of which is the fastest.

    Attributes:
        micro_batches: Into how many the batch is split.
    """

    micro_batches: int

    def propose(self, budget: float) -> tuple[float, Any] | None:
        """Returns the fastest one that may fit: its estimated time, and what it does.

        None if none may, or it was compiled already.
        """
        ...

    def learn(self, plan: Any, result: Probe, budget: float) -> float:
        """Corrects the estimates by a compiled plan; the error of its bytes, as a fraction."""
        ...


def margin(total: float, budget: float) -> float:
    """Returns the bytes to leave free after a plan that needs `total`."""
    return _MARGIN * budget if total > budget else 0.0


@dataclasses.dataclass
class Variant:
    """The plans with some number of micro-batches.

    Attributes:
        micro_batches: Their number.
        problem: What is decided.
        more_bytes: What a compiled step takes beyond the estimate.
        more_seconds: The same of its estimated time.
        tried: What was compiled.
        ratios: Of the last one.
    """

    micro_batches: int
    problem: Problem
    more_bytes: float = 0.0
    more_seconds: float = 0.0
    tried: list[Assignment] = dataclasses.field(default_factory=list)
    ratios: Ratios = dataclasses.field(default_factory=dict)

    def propose(self, budget: float) -> tuple[float, Assignment] | None:
        """Returns the fastest choices, and their estimated time.

        It is None if they were compiled already.
        """
        found = solve(self.problem, budget - self.more_bytes)
        if found is None or found in self.tried:
            return None
        return self.problem.seconds(found) + self.more_seconds, found

    def learn(self, assignment: Assignment, result: Probe, budget: float) -> float:
        """Corrects the estimates by a compiled plan; the error of its bytes, as a fraction.

        The times of groups and their choices follow those of the plan. What is left of the first
        error is put down to the boundaries, of a later one to all plans alike.
        """
        total = result.report.total_bytes
        assert total is not None
        self.ratios = ratios_of(self.problem, assignment, result)
        self.problem = corrected(self.problem, self.ratios)
        bytes_, seconds = self._beyond(assignment, result)
        count = len(self.problem.boundaries(assignment))
        if count and self.problem.boundary == FREE:
            self.set_boundary(Choice(max(0.0, bytes_) / count, max(0.0, seconds) / count))
        self.tried.append(assignment)
        beyond = self._beyond(assignment, result)
        self.more_bytes += beyond[0] + margin(total, budget)
        self.more_seconds += beyond[1]
        return -bytes_ / total

    def set_boundary(self, boundary: Choice) -> None:
        """Sets what a pair of neighbours takes more if its choices differ."""
        self.problem = dataclasses.replace(self.problem, boundary=boundary)

    def _beyond(self, assignment: Assignment, result: Probe) -> tuple[float, float]:
        """Returns the bytes and seconds that a plan takes beyond the estimate."""
        total = (result.report.total_bytes or 0) - self.more_bytes
        seconds = result.seconds - self.more_seconds
        return total - self.problem.peak(assignment)[0], seconds - self.problem.seconds(assignment)


def improve(
    kinds: Sequence[Plans],
    budget: float,
    compile_plan: Compile,
    left: Callable[[], int],
    best_seconds: Callable[[], float],
) -> list[float]:
    """Compiles plans as long as one is estimated to be faster than all that fit.

    The first plan of a class is taken to be 3% faster than estimated. While nothing fits, it comes
    before a second plan of another class. Plans of a kind are done with when one fails, or fills
    the budget and is the fastest so far.

    Args:
        kinds: The plans to choose from.
        budget: In bytes.
        compile_plan: Compiles what was proposed, with a number of micro-batches; None if that
            fails.
        left: How many more may be compiled.
        best_seconds: The least estimated time of what was compiled and fits.

    Returns:
        The error of the estimated bytes of each plan.
    """
    errors: list[float] = []
    open_kinds = list(kinds)
    compiled: set[type] = set()
    while left():
        best = best_seconds()
        proposed = _proposed(open_kinds, budget, best, compiled)
        if proposed is None:
            break
        plan, plans = proposed
        compiled.add(type(plans))
        result = compile_plan(plan, plans.micro_batches)
        if result is None or result.report.total_bytes is None:
            open_kinds.remove(plans)
            continue
        errors.append(plans.learn(plan, result, budget))
        for other in open_kinds:
            if isinstance(plans, Variant) and isinstance(other, Variant) and not other.tried:
                _pass_on(plans, other)
        is_full = (1 - _SLACK) * budget < result.report.total_bytes <= budget
        if is_full and result.seconds < best:
            open_kinds.remove(plans)
    return errors


def _pass_on(learned: Variant, other: Variant) -> None:
    """Corrects plans of which none was compiled as far as they are like others."""
    boundary, ratio = learned.problem.boundary, learned.micro_batches / other.micro_batches
    other.set_boundary(dataclasses.replace(boundary, bytes=ratio * boundary.bytes))
    other.problem = corrected(other.problem, learned.ratios)
    if ratio == 1.0:
        other.more_seconds = learned.more_seconds


def _proposed(
    kinds: Sequence[Plans], budget: float, best: float, compiled: Collection[type]
) -> tuple[Any, Plans] | None:
    """Returns the plan to compile next, and its kind; None if none may be faster than the best.

    Args:
        kinds: The plans to choose from.
        budget: In bytes.
        best: The least estimated time of what fits; infinite if nothing does.
        compiled: The classes of which a plan was compiled.
    """
    found = []
    for plans in kinds:
        proposal = plans.propose(budget)
        if proposal is None:
            continue
        seconds, plan = proposal
        is_first = type(plans) not in compiled
        if is_first:
            seconds /= _FIRST
        if seconds < best:
            waits = best == math.inf and not is_first
            found.append((waits, seconds, plan, plans))
    if not found:
        return None
    *_, plan, plans = min(found, key=lambda item: item[:2])
    return plan, plans
