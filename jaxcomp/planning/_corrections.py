"""What a compiled plan shows of groups that are alike, such as those of equal blocks."""

import dataclasses
from collections.abc import Mapping

from jaxcomp.planning._groups import block_of
from jaxcomp.planning._probe import Probe
from jaxcomp.planning._solver import Problem
from jaxcomp.transform._plan import without_indices

Ratios = Mapping[tuple[str, str], float]
"""The compiled over the estimated time, by a group's path without indices and its choice."""


def ratios_of(problem: Problem, assignment: Mapping[str, str], result: Probe) -> Ratios:
    """Returns the ratios of the groups in blocks whose neighbours have the same choice.

    A neighbour with another choice changes the time. Of groups that are alike it is the least.

    Args:
        problem: The estimates.
        assignment: A plan.
        result: What the compiler made of it.
    """
    at_boundary = {group for pair in problem.boundaries(assignment) for group in pair}
    found: dict[tuple[str, str], float] = {}
    for group, name in assignment.items():
        estimate, kind = problem.choices[group][name].seconds, (without_indices(group), name)
        if block_of(group) and estimate and group not in at_boundary:
            ratio = result.seconds_of.get(group, 0.0) / estimate
            found[kind] = min(ratio, found.get(kind, ratio))
    return found


def corrected(problem: Problem, ratios: Ratios) -> Problem:
    """Returns the problem with estimated times multiplied by ratios."""
    choices = {
        group: {
            name: dataclasses.replace(
                choice, seconds=choice.seconds * ratios.get((without_indices(group), name), 1.0)
            )
            for name, choice in named.items()
        }
        for group, named in problem.choices.items()
    }
    return dataclasses.replace(problem, choices=choices)
