"""`cond` and `switch` in a function: each branch stores what the policy says of its values."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn

from jaxcomp._core.custom_derivative import with_derivative
from jaxcomp._core.linear_map import ByPosition
from jaxcomp._core.shard_map import filled
from jaxcomp.codecs import noise
from jaxcomp.policies._policy import has_codecs
from jaxcomp.transform._choice.decisions import PolicyLog
from jaxcomp.transform._execution.backward import used_arguments
from jaxcomp.transform._nested.scheduled import Make, Part, Scheduled, scoped
from jaxcomp.transform._program.program import Program, avals, is_of_collective

Entries = dict[tuple[bool, int], Any]  # what a branch has stored, or its seed, by number


@functools.partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["places"])
@dataclasses.dataclass(frozen=True)
class Kept:
    """What the branch that was taken has stored, where branches share memory.

    Attributes:
        arrays: The entries; zeros where the branch has none.
        places: The place in `arrays` of each entry, for each branch.
    """

    arrays: list[Any]
    places: tuple[tuple[tuple[tuple[bool, int], int], ...], ...]


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
    branches = [Program.of(branch) for branch in equation.params["branches"]]
    kinds = avals(equation.invars)
    operands = range(len(kinds) - 1)
    encodes = has_codecs(log.policy)

    def conditional(seed: Any, index: Any, *values: Any) -> list[Any]:
        return list(lax.switch(index, branches, *values))

    def prepare(seed: Any, values: list[Any], perturbed: list[int]) -> Part:
        active = [i - 1 for i in perturbed if jnp.issubdtype(kinds[i].dtype, jnp.inexact)]
        coded = [i for i in operands if encodes and not is_free[i + 1]]
        chosen = tuple(make(scoped(each, equation), active, coded, log) for each in branches)
        parts.append(Part(chosen))
        return parts[-1]

    def forward(part: Part, seed: Any, values: list[Any]) -> tuple[list[Any], Any]:
        index, *given = values
        chosen = part.programs
        own = noise.folded(seed, number) if encodes else None

        def run(branch: Scheduled, own: Any, *given: Any) -> tuple[list[Any], Entries]:
            made, (stored, used) = branch.forward(own, given)
            outside = branch.stored_operands
            entries = {(True, i): value for i, value in stored.items() if i not in outside}
            return made, entries | {(False, i): v for i, v in used.items() if i not in operands}

        made, kept = _switch_with_entries(
            index, [functools.partial(run, branch) for branch in chosen], own, *given
        )
        # No policy decides about values that are ours by this name.
        kept = jax.tree.map(lambda leaf: checkpoint_name(leaf, part.name), kept)
        used = {i for b in chosen for i in used_arguments(b.schedule)}
        used |= {i for b in chosen for i in b.stored_operands.values()}
        held = {i: given[i] for i in operands if i in used}
        return made, (index, kept, held)

    def linear(part: Part, residual: Any, tangents: ByPosition) -> ByPosition:
        of_operands = {i - 1: t for i, t in tangents.items()}
        return in_branch(part, residual, lambda branch, own: branch.linear(own, of_operands))

    def backward(part: Part, residual: Any, cotangents: ByPosition) -> ByPosition:
        made = in_branch(part, residual, lambda branch, own: branch.backward(own, cotangents))
        return {i + 1: c for i, c in made.items()}

    def in_branch(
        part: Part, residual: Any, function: Callable[[Scheduled, Any], ByPosition]
    ) -> ByPosition:
        """Calls a function of the branch that was taken and of what it has stored."""
        index, kept, held = residual

        def run(branch: Scheduled, places: tuple[Any, ...]) -> ByPosition:
            entries = {key: kept.arrays[place] for key, place in places}
            stored, own = (
                {i: entry for (is_stored, i), entry in entries.items() if is_stored == which}
                for which in (True, False)
            )
            stored |= {number: held[i] for number, i in branch.stored_operands.items()}
            return function(branch, (stored, own | held))

        pairs = zip(part.programs, kept.places, strict=True)
        made: ByPosition = lax.switch(index, [functools.partial(run, *pair) for pair in pairs])
        return made

    return with_derivative(conditional, prepare, forward, linear, backward)


def _switch_with_entries(
    index: Any, functions: Sequence[Callable[..., tuple[list[Any], Entries]]], *operands: Any
) -> tuple[list[Any], Kept]:
    """Calls one of several functions that return results and entries of their own.

    Returns:
        The results, and the entries, of which those of equal types share a place.
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
        results = Program.of(programs[number])(*leaves)
        tree: Any = jax.tree.structure(traced[number][1][1])
        entries = tree.unflatten(results[count:])
        made = {place: entries[key] for key, place in places[number].items()}
        return results[:count], [
            made[place] if place in made else jax.tree.map(_zero, kind)
            for place, kind in enumerate(kinds)
        ]

    runs = [functools.partial(run, number) for number in range(len(functions))]
    results, kept = lax.switch(index, runs, *jax.tree.leaves(operands))
    return results, Kept(kept, tuple(tuple(sorted(of_one.items())) for of_one in places))


def _zero(kind: Any) -> Any:
    """A zero of a type, in the memory of that type."""
    return jax.device_put(filled(kind, 0.0), kind.memory_space)
