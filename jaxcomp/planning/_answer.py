"""What `fit` answers, from the strategies that were compiled."""

import math

from jaxcomp.memory._live_bytes import format_bytes
from jaxcomp.planning._fitted import FittedPlan, Part
from jaxcomp.planning._groups import Groups, is_in
from jaxcomp.planning._search import Candidate, Search
from jaxcomp.planning._verdict import Room, explain
from jaxcomp.policies._policy import Policy


class DoesNotFitError(ValueError):
    """The arguments of a step, or all strategies that were compiled, do not fit the budget."""


def answer(search: Search, budget: int) -> FittedPlan:
    """Returns the strategy that the verdict chooses of what was compiled and fits.

    Args:
        search: What was compiled. Its budget is without the allowance.
        budget: The budget.

    Raises:
        DoesNotFitError: If nothing fits.
    """
    best = search.answer()
    if best is None:
        raise _does_not_fit(search)
    strategy, result = best.strategy, best.result
    policy = strategy.policy if isinstance(strategy.policy, Policy) else None
    notes = list(search.notes)
    noise = search.noise_of(best)
    if best.is_noisy and noise is None:
        notes.append(
            "the gradient is noisier than the plain one; data=(loss, model, batch) measures it"
        )
    where, saved, rest = result.peak()
    known = {*result.saved, *result.seconds_of}
    assignment = best.assignment or {group: _action(best, group, search.groups) for group in known}
    total = result.report.total_bytes
    assert total is not None
    return FittedPlan(
        target=search.target.name,
        batch=search.batch,
        budget_bytes=budget,
        allowance_bytes=budget - search.budget,
        name=best.name,
        policy=policy,
        spec="" if policy is not None else strategy.spec,
        micro_batches=strategy.micro_batches,
        total_bytes=total,
        milliseconds=1e3 * result.seconds,
        parts=tuple(
            Part(
                group,
                action,
                result.saved.get(group, 0),
                1e3 * result.seconds_of.get(group, 0.0),
                None if search.noise is None else math.sqrt(search.noise.of(group, action)),
            )
            for group, action in sorted(assignment.items())
        ),
        frontier=tuple(
            search.compiled(c) for c in sorted(search.found, key=lambda c: c.result.seconds)
        ),
        binding=(
            f"the peak is in the {where}: {format_bytes(saved)} of saved activations, "
            f"{format_bytes(rest)} of all else"
        ),
        errors=tuple(search.errors),
        noise=noise,
        verdict=_verdict(search, best, budget),
        notes=tuple(notes),
    )


def _verdict(search: Search, chosen: Candidate, budget: int) -> str:
    if chosen.measured is not None:
        return f"Answer: {chosen.name}, which took the least time of what fits and was run."
    room = Room(budget, budget - search.budget, search.target.name)
    plain = next(c for c in search.found if c.strategy.is_plain)
    kept = [*search.fitting(), *([] if search.fits(plain.result) else [plain])]
    return explain([search.option(c) for c in kept], room)


def _action(candidate: Candidate, group: str, groups: Groups) -> str:
    """Returns what a named strategy does with a group."""
    if candidate.strategy.first_blocks is None:
        return candidate.name
    first, others = candidate.strategy.first_blocks
    actions = ["remat"] * first + ["remat:weights"] * others
    for block, action in zip(groups.blocks, actions, strict=False):  # all others are kept
        if is_in(group, block):
            return action
    return "keep"


def _does_not_fit(search: Search) -> DoesNotFitError:
    budget = f"budget={format_bytes(search.budget)}"
    if search.noise is not None:
        budget = f"{budget}, noise={search.most_noise}"
    loud = [c for c in search.found if search.fits(c.result) and not search.is_quiet(c)]
    if loud:
        least = min(loud, key=lambda c: search.noise_of(c) or 0.0)
        return DoesNotFitError(
            f"{budget}: nothing fits with so little noise; {least.name} fits, with an estimated "
            f"noise of {search.noise_of(least):.3f}{''.join(f'; {note}' for note in search.notes)}"
        )
    reached = [c for c in search.found if c.result.report.total_bytes and c.result.moments]
    admitted = [c for c in reached if c.assignment is not None or search.admits(c.strategy)]
    aside = "" if admitted else ", which does not keep to pin and actions"
    reached = admitted or reached
    if not reached:
        return DoesNotFitError(f"{budget}: nothing could be compiled")
    least = min(reached, key=lambda c: c.result.report.total_bytes or 0)
    report = least.result.report
    where, saved, rest = least.result.peak()
    given = report.argument_bytes or 0
    return DoesNotFitError(
        f"{budget}: nothing fits; the least is {least.name}{aside}, with "
        f"{format_bytes(report.total_bytes or 0)}, of which {format_bytes(given)} are arguments "
        f"(parameters, optimizer state, batch) and at the peak, in the {where}, "
        f"{format_bytes(saved)} saved activations and {format_bytes(max(0, rest - given))} other "
        "temporary memory. A smaller batch, more micro-batches (accumulate:N), an optimizer with "
        "less state or a loss that is computed in parts takes less"
        f"{''.join(f'; {note}' for note in search.notes)}"
    )
