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

Branches = tuple[Scheduled, ...]


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

    def forward(
        seed: Any, values: list[Any], perturbed: list[int]
    ) -> tuple[list[Any], Branches, Any]:
        index, *given = values
        active = [i - 1 for i in perturbed if jnp.issubdtype(kinds[i].dtype, jnp.inexact)]
        coded = [i for i in operands if encodes and not is_free[i + 1]]
        chosen = scheduled_branches(active, coded)
        kept_exactly = {i for branch in chosen for i in _stored_as_they_are(branch)}
        if kept_exactly:  # held outside of the branches, which makes no copy
            chosen = scheduled_branches(active, [i for i in coded if i not in kept_exactly])
        parts.append(Part(chosen))
        own = noise.folded(seed, number) if encodes else None

        def run(branch: Scheduled, own: Any, *given: Any) -> tuple[list[Any], Any]:
            made, (stored, used) = branch.forward(own, given)
            return made, (stored, {i: value for i, value in used.items() if i not in operands})

        made, kept = _switch_with_residuals(
            index, [functools.partial(run, branch) for branch in chosen], own, *given
        )
        # No policy decides about values that are ours by this name.
        kept = jax.tree.map(lambda leaf: checkpoint_name(leaf, parts[-1].name), kept)
        used = {i for branch in chosen for i in passes.used_arguments(branch.schedule)}
        return made, chosen, (index, kept, {i: given[i] for i in operands if i in used})

    def scheduled_branches(active: list[int], coded: list[int]) -> Branches:
        return tuple(make(scoped(branch, equation), active, coded, log) for branch in branches)

    def linear(chosen: Branches, residual: Any, tangents: ByPosition) -> ByPosition:
        schedule = chosen[0].schedule
        moves = [tangents[i + 1] for i in schedule.active]
        made = in_branch(residual, [functools.partial(b.linear, tangents=moves) for b in chosen])
        return dict(zip(schedule.smooth, made, strict=True))

    def backward(chosen: Branches, residual: Any, cotangents: ByPosition) -> ByPosition:
        made = in_branch(
            residual, [functools.partial(b.backward, cotangents=cotangents) for b in chosen]
        )
        return {i + 1: c for i, c in zip(chosen[0].schedule.active, made, strict=True)}

    def in_branch(residual: Any, functions: Sequence[Callable[[Any], list[Any]]]) -> list[Any]:
        """Calls the function of the branch that was taken with what the branch has stored."""
        index, kept, held = residual

        def run(number: int) -> list[Any]:
            stored, own = kept[number]
            return functions[number]((stored, own | held))

        numbers = range(len(functions))
        return list(lax.switch(index, [functools.partial(run, number) for number in numbers]))

    if encodes:
        return with_reverse_mode(conditional, forward, backward, len(kinds))
    return with_both_modes(conditional, forward, linear, backward)


def _stored_as_they_are(branch: Scheduled) -> list[int]:
    """The operands that a branch stores without encoding them."""
    stored = branch.schedule.stored
    exact = {v for v, how in stored.items() if how.codec is None and not how.offload}
    return [i for i, v in enumerate(branch.schedule.graph.jaxpr.invars) if v in exact]


def _switch_with_residuals(
    index: Any, functions: Sequence[Callable[..., tuple[Any, Any]]], *operands: Any
) -> tuple[Any, list[Any]]:
    """Calls one of several functions that return results and residuals of their own.

    Returns:
        The results; and the residuals of each function, zeros but for the one that was called.
    """
    traced = [jax.make_jaxpr(f, return_shape=True)(*operands) for f in functions]
    programs = [program for program, _ in traced]
    made: Any = jax.tree.structure(traced[0][1][0])
    trees: list[Any] = [jax.tree.structure(residual) for _, (_, residual) in traced]
    kinds = [program.out_avals[made.num_leaves :] for program in programs]

    def run(number: int, *leaves: Any) -> tuple[list[Any], list[Any]]:
        results = jaxpr_as_fun(programs[number])(*leaves)
        residuals = [[filled(kind, 0.0) for kind in each] for each in kinds]
        residuals[number] = results[made.num_leaves :]
        return results[: made.num_leaves], residuals

    results, residuals = lax.switch(
        index,
        [functools.partial(run, number) for number in range(len(functions))],
        *jax.tree.leaves(operands),
    )
    unflattened = [tree.unflatten(each) for tree, each in zip(trees, residuals, strict=True)]
    return made.unflatten(results), unflattened
