"""`cond` and `switch` in a function: each branch stores what the policy says of its values."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray
from jaxtyping import Array, PyTree

from jaxcomp._core.custom_derivative import Differentiable
from jaxcomp._core.linear_map import ByPosition
from jaxcomp._core.shard_map import filled
from jaxcomp.codecs import noise
from jaxcomp.codecs._codec import Seed
from jaxcomp.transform._execution.backward import used_arguments
from jaxcomp.transform._nested.scheduled import Nested, Outer, ScheduledProgram
from jaxcomp.transform._program.program import Program, avals, is_of_collective
from jaxcomp.transform._program.types import Equation

Key = tuple[bool, int]  # whether it is what a branch has stored, or its seed; its number
Entries = dict[Key, Any]
Places = tuple[tuple[Key, int], ...]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["places"])
@dataclasses.dataclass(frozen=True)
class Kept:
    """What the branch that was taken has stored, where branches share memory.

    Attributes:
        arrays: The entries; zeros where the branch has none.
        places: The place in `arrays` of each entry, for each branch.
    """

    arrays: list[Any]
    places: tuple[Places, ...]


def is_conditional(equation: Equation) -> bool:
    """Returns whether it is a `cond` or `switch` without effects but those of collectives.

    `jax.lax.platform_dependent` is none, since it is resolved when the program is compiled.
    """
    return (
        equation.primitive.name == "cond"
        and equation.params.get("branches_platforms") is None
        and all(map(is_of_collective, equation.effects))
    )


class Conditional(Differentiable[Nested]):
    """A `cond` or `switch` whose branches store by schedules of their own.

    The first argument is the number of the branch.
    """

    def __init__(self, equation: Equation, number: int, is_free: list[bool], outer: Outer) -> None:
        """Reads the equation of a conditional.

        Args:
            equation: The equation.
            number: One that tells the conditional's noise from that of others.
            is_free: Whether each operand is free to be had again.
            outer: The program that the conditional is in.
        """
        self._branches = [Program.of(branch) for branch in equation.params["branches"]]
        self._equation, self._number, self._outer = equation, number, outer
        self._operands = range(len(equation.invars) - 1)
        self._coded = [i for i in self._operands if outer.context.encodes and not is_free[i + 1]]

    def evaluate(self, seed: Seed, arguments: list[Array]) -> list[Array]:
        """Returns the results of the stock conditional."""
        index, *operands = arguments
        return list(lax.switch(index, self._branches, *operands))

    def choose(self, seed: Seed, arguments: list[Array], differentiated: list[int]) -> Nested:
        """Returns the schedules of the branches."""
        kinds = avals(self._equation.invars)
        active = [i - 1 for i in differentiated if jnp.issubdtype(kinds[i].dtype, jnp.inexact)]
        scheduled = (
            self._outer.scheduled(branch, self._equation, active, self._coded)
            for branch in self._branches
        )
        return self._outer.noted(Nested(tuple(scheduled)))

    def forward(
        self, choice: Nested, seed: Seed, arguments: list[Array]
    ) -> tuple[list[Array], PyTree]:
        """Returns the results, the branch's number, and what the branch stored and reads again."""
        index, *operands = arguments
        branches = choice.programs
        of_branch = noise.folded(seed, self._number) if self._outer.context.encodes else None

        def run(
            branch: ScheduledProgram, seed: Seed, *operands: Array
        ) -> tuple[list[Array], Entries]:
            results, (stored, used) = branch.forward(seed, operands)
            outside = branch.stored_operands
            entries = {(True, i): value for i, value in stored.items() if i not in outside}
            inside = {(False, i): v for i, v in used.items() if i not in self._operands}
            return results, entries | inside

        functions = [functools.partial(run, branch) for branch in branches]
        results, saved = _switch_with_entries(index, functions, of_branch, *operands)
        # No policy decides about values that are ours by this name.
        saved = jax.tree.map(lambda leaf: checkpoint_name(leaf, choice.name), saved)
        used = {i for b in branches for i in used_arguments(b.schedule)}
        used |= {i for b in branches for i in b.stored_operands.values()}
        return results, (index, saved, {i: operands[i] for i in self._operands if i in used})

    def linear(self, choice: Nested, residual: PyTree, tangents: ByPosition) -> ByPosition:
        """Returns the tangents of results, by the branch that was taken."""
        moves = {i - 1: tangent for i, tangent in tangents.items()}
        return _in_branch(
            choice,
            residual,
            lambda branch, residual_of_branch: branch.linear(residual_of_branch, moves),
        )

    def backward(self, choice: Nested, residual: PyTree, cotangents: ByPosition) -> ByPosition:
        """Returns the cotangents of operands, by the branch that was taken."""
        of_operands = _in_branch(
            choice,
            residual,
            lambda branch, residual_of_branch: branch.backward(residual_of_branch, cotangents),
        )
        return {i + 1: cotangent for i, cotangent in of_operands.items()}


def _in_branch(
    choice: Nested, residual: PyTree, function: Callable[[ScheduledProgram, PyTree], ByPosition]
) -> ByPosition:
    """Calls a function of the branch that was taken and of its residual."""
    index, saved, operands = residual

    def run(branch: ScheduledProgram, places: Places) -> ByPosition:
        entries = {key: saved.arrays[place] for key, place in places}
        stored, inside = (
            {i: entry for (is_stored, i), entry in entries.items() if is_stored == which}
            for which in (True, False)
        )
        stored |= {number: operands[i] for number, i in branch.stored_operands.items()}
        return function(branch, (stored, inside | operands))

    pairs = zip(choice.programs, saved.places, strict=True)
    of_branch: ByPosition = lax.switch(index, [functools.partial(run, *pair) for pair in pairs])
    return of_branch


def _switch_with_entries(
    index: Array, functions: Sequence[Callable[..., tuple[list[Array], Entries]]], *operands: PyTree
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
        kinds_by_key = tree.unflatten(program.out_avals[count:])
        free = list(range(len(kinds)))
        places.append({})
        for key, kind in kinds_by_key.items():
            shared = next((place for place in free if kinds[place] == kind), None)
            if shared is None:
                shared = len(kinds)
                kinds.append(kind)
            else:
                free.remove(shared)
            places[-1][key] = shared

    def run(number: int, *leaves: Array) -> tuple[list[Any], list[Any]]:
        results = Program.of(programs[number])(*leaves)
        tree: Any = jax.tree.structure(traced[number][1][1])
        entries = tree.unflatten(results[count:])
        by_place = {place: entries[key] for key, place in places[number].items()}
        return results[:count], [
            by_place[place] if place in by_place else jax.tree.map(_zero, kind)
            for place, kind in enumerate(kinds)
        ]

    runs = [functools.partial(run, number) for number in range(len(functions))]
    results, saved = lax.switch(index, runs, *jax.tree.leaves(operands))
    return results, Kept(saved, tuple(tuple(sorted(of_one.items())) for of_one in places))


def _zero(kind: ShapedArray) -> Any:
    """Returns a zero of a type, in the memory of that type."""
    zero = filled(kind, 0.0)
    if kind.memory_space == jax.memory.Space.Device:
        return zero  # `jax.device_put` would commit results to a device, outside of jax.jit
    return jax.device_put(zero, kind.memory_space)
