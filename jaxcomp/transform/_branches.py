"""`cond` and `switch` in a function: each branch stores what the policy says of its values."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn, jaxpr_as_fun

from jaxcomp.codecs import noise
from jaxcomp.policies._policy import has_codecs
from jaxcomp.transform import _passes as passes
from jaxcomp.transform._decisions import PolicyLog
from jaxcomp.transform._linear_map import ByPosition
from jaxcomp.transform._programs import avals, filled, is_of_collective
from jaxcomp.transform._rules import with_both_modes, with_reverse_mode
from jaxcomp.transform._scheduled import Make, Part, Scheduled, scoped

Entries = dict[tuple[bool, int], Any]  # what a branch has stored, or its seed, by number
Known = tuple[tuple[Scheduled, ...], list[dict[Any, int]]]


def is_conditional(equation: JaxprEqn) -> bool:
    """Whether it is a `cond` or `switch` whose only effects, if any, are those of collectives.

    `jax.lax.platform_dependent` is none, since it is resolved when the program is compiled.
    """
    return (
        equation.primitive.name == "cond"
        and equation.params.get("branches_platforms") is None
        and all(map(is_of_collective, equation.effects))
    )


def coded_branches(
    equation: JaxprEqn,
    number: int,
    is_free: list[bool],
    log: PolicyLog,
    parts: list[Part],
    make: Make,
) -> Callable[..., list[Any]]:
    """A conditional as a function of a seed, the branch's number and the branches' operands."""
    branches = equation.params["branches"]
    kinds = avals(equation.invars)
    operands = range(len(kinds) - 1)
    encodes = has_codecs(log.policy)

    def conditional(seed: Any, index: Any, *values: Any) -> list[Any]:
        return list(lax.switch(index, [*map(jaxpr_as_fun, branches)], *values))

    def forward(seed: Any, values: list[Any], perturbed: list[int]) -> tuple[list[Any], Known, Any]:
        index, *given = values
        active = [i - 1 for i in perturbed if jnp.issubdtype(kinds[i].dtype, jnp.inexact)]
        coded = [i for i in operands if encodes and not is_free[i + 1]]
        chosen = tuple(make(scoped(each, equation), active, coded, log) for each in branches)
        parts.append(Part(chosen))
        own = noise.folded(seed, number) if encodes else None

        def run(branch: Scheduled, own: Any, *given: Any) -> tuple[list[Any], Entries]:
            made, (stored, used) = branch.forward(own, given)
            outside = branch.stored_operands
            entries = {(True, i): value for i, value in stored.items() if i not in outside}
            return made, entries | {(False, i): v for i, v in used.items() if i not in operands}

        made, kept, places = _switch_with_entries(
            index, [functools.partial(run, branch) for branch in chosen], own, *given
        )
        # No policy decides about values that are ours by this name.
        kept = jax.tree.map(lambda leaf: checkpoint_name(leaf, parts[-1].name), kept)
        used = {i for b in chosen for i in passes.used_arguments(b.schedule)}
        used |= {i for b in chosen for i in b.stored_operands.values()}
        held = {i: given[i] for i in operands if i in used}
        return made, (chosen, places), (index, kept, held)

    def linear(known: Known, residual: Any, tangents: ByPosition) -> ByPosition:
        schedule = known[0][0].schedule
        moves = [tangents[i + 1] for i in schedule.active]
        made = in_branch(known, residual, lambda branch, own: branch.linear(own, moves))
        return dict(zip(schedule.smooth, made, strict=True))

    def backward(known: Known, residual: Any, cotangents: ByPosition) -> ByPosition:
        made = in_branch(known, residual, lambda branch, own: branch.backward(own, cotangents))
        return {i + 1: c for i, c in zip(known[0][0].schedule.active, made, strict=True)}

    def in_branch(
        known: Known, residual: Any, function: Callable[[Scheduled, Any], list[Any]]
    ) -> list[Any]:
        """Calls a function of the branch that was taken and of what it has stored."""
        index, kept, held = residual

        def run(branch: Scheduled, places: dict[Any, int]) -> list[Any]:
            entries = {key: kept[place] for key, place in places.items()}
            stored, own = (
                {i: entry for (is_stored, i), entry in entries.items() if is_stored == which}
                for which in (True, False)
            )
            stored |= {number: held[i] for number, i in branch.stored_operands.items()}
            return function(branch, (stored, own | held))

        runs = [functools.partial(run, *each) for each in zip(*known, strict=True)]
        return list(lax.switch(index, runs))

    if encodes:
        return with_reverse_mode(conditional, forward, backward, len(kinds))
    return with_both_modes(conditional, forward, linear, backward)


def _switch_with_entries(
    index: Any, functions: Sequence[Callable[..., tuple[list[Any], Entries]]], *operands: Any
) -> tuple[list[Any], list[Any], list[dict[Any, int]]]:
    """Calls one of several functions that return results and entries of their own.

    Returns:
        The results; the entries, of which those of equal types share a place; and the place of each
        entry of each function. What the function that was called has no entry for is zero.
    """
    traced = [jax.make_jaxpr(f, return_shape=True)(*operands) for f in functions]
    programs = [program for program, _ in traced]
    count = len(traced[0][1][0])
    kinds: list[Any] = []  # of the places
    places: list[dict[Any, int]] = []
    for program, (_, entries) in traced:
        tree: Any = jax.tree.structure(entries)
        own = tree.unflatten(program.out_avals[count:])
        free = list(range(len(kinds)))
        places.append({})
        for key, kind in own.items():
            found = next((place for place in free if kinds[place] == kind), None)
            if found is None:
                found = len(kinds)
                kinds.append(kind)
            else:
                free.remove(found)
            places[-1][key] = found

    def run(number: int, *leaves: Any) -> tuple[list[Any], list[Any]]:
        results = jaxpr_as_fun(programs[number])(*leaves)
        tree: Any = jax.tree.structure(traced[number][1][1])
        entries = tree.unflatten(results[count:])
        made = {place: entries[key] for key, place in places[number].items()}
        return results[:count], [
            made[place] if place in made else jax.tree.map(_zero, kind)
            for place, kind in enumerate(kinds)
        ]

    runs = [functools.partial(run, number) for number in range(len(functions))]
    results, kept = lax.switch(index, runs, *jax.tree.leaves(operands))
    return results, kept, places


def _zero(kind: Any) -> Any:
    """A zero of a type, in the memory of that type."""
    return jax.device_put(filled(kind, 0.0), kind.memory_space)
