"""`scan` loops inside of a function: each iteration stores what the policy says of its values."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn

from jaxcomp._core.custom_derivative import undivided, with_derivative
from jaxcomp._core.linear_map import ByPosition
from jaxcomp._core.shard_map import filled
from jaxcomp.codecs import noise
from jaxcomp.policies._policy import has_codecs
from jaxcomp.transform._choice.decisions import PolicyLog
from jaxcomp.transform._execution.backward import used_arguments
from jaxcomp.transform._nested.scheduled import Make, Part, scoped, with_zeros
from jaxcomp.transform._program.primitives import tangents_of
from jaxcomp.transform._program.program import Program, avals, is_of_collective, is_variable

_SCAN = "scan"


def is_loop(equation: JaxprEqn) -> bool:
    """Whether it is a `scan` whose only effects, if any, are those of collectives."""
    return equation.primitive.name == _SCAN and all(map(is_of_collective, equation.effects))


def coded_loop(
    equation: JaxprEqn,
    number: int,
    is_free: list[bool],
    log: PolicyLog,
    parts: list[Part],
    make: Make,
) -> Callable[..., list[Any]]:
    """A loop as a function of a seed and its operands, of which some are free to be had again."""
    body, length = Program.of(equation.params["jaxpr"]), equation.params["length"]
    consts, carries = _counts(equation, body)
    options = {"length": length, "unroll": equation.params["unroll"]}
    reverse = equation.params["reverse"]
    at_x = consts + carries
    coded = [i for i in range(consts, len(is_free)) if i < at_x or not is_free[i]]
    kinds = avals(body.arguments)
    encodes = has_codecs(log.policy)

    def loop(seed: Any, *values: Any) -> list[Any]:
        def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            made = body(*values[:consts], *carry, *x)
            return made[:carries], made[carries:]

        rest = list(values[at_x:])
        final, ys = lax.scan(step, list(values[consts:at_x]), rest, reverse=reverse, **options)
        return [*final, *ys]

    def prepare(seed: Any, values: list[Any], perturbed: list[int]) -> Part:
        active = _active(body, {*perturbed}, consts, carries)
        chosen = make(scoped(body, equation), active, coded, log.inside(length))
        parts.append(Part((chosen,), length))
        return parts[-1]

    def forward(part: Part, seed: Any, values: list[Any]) -> tuple[list[Any], Any]:
        (chosen,) = part.programs

        def run(seed: Any, values: list[Any]) -> Any:
            def step(carry: Any, x: list[Any]) -> tuple[Any, Any]:
                index, state = carry
                of_iteration = noise.folded(noise.folded(seed, number), index) if encodes else None
                made, (stored, used) = chosen.forward(of_iteration, [*values[:consts], *state, *x])
                own = {i: value for i, value in used.items() if not is_held(i)}
                return (index + jnp.uint32(1), made[:carries]), (made[carries:], (stored, own))

            start = jnp.uint32(0), values[consts:at_x]
            return lax.scan(step, start, values[at_x:], reverse=reverse, **options)

        (count, final), (ys, kept) = undivided(run, seed, values)
        # No policy decides about values that are ours by this name, such as the iteration count.
        kept, _ = jax.tree.map(lambda leaf: checkpoint_name(leaf, part.name), (kept, count))
        used = used_arguments(chosen.schedule)
        held = {i: values[i] for i in used if is_held(i)}
        return [*final, *ys], (kept, held)

    def is_held(i: int) -> bool:
        """Whether what the backward pass reads is an operand of the loop, and not its own seed.

        It never reads a carry as it is: an iteration stores what it needs of it.
        """
        return i < len(kinds)

    def linear(part: Part, residual: Any, given: ByPosition) -> ByPosition:
        (chosen,) = part.programs
        smooth, active = chosen.schedule.smooth, chosen.schedule.active
        kept, whole, stacked = split(residual)
        fixed = {i: move for i, move in given.items() if i < consts}
        along = {i: move for i, move in given.items() if i >= at_x}
        start = {
            i: given[i] if i in given else filled(kinds[i], 0.0)
            for i in active
            if consts <= i < at_x
        }

        def step(state: Any, x: Any) -> tuple[dict[int, Any], dict[int, Any]]:
            (stored, own), rest, moving = x
            moves = fixed | state | moving
            found = chosen.linear((stored, own | rest | whole), moves)
            return {i: found[i - consts] for i in state}, {
                i: move for i, move in found.items() if i >= carries
            }

        final, each = lax.scan(step, start, (kept, stacked, along), reverse=reverse, **options)
        still = {i: filled(equation.outvars[i].aval, 0.0) for i in smooth}
        return still | {i - consts: move for i, move in final.items()} | each

    def backward(part: Part, residual: Any, cotangents: ByPosition) -> ByPosition:
        (chosen,) = part.programs
        active = chosen.schedule.active
        summed, carried, along = (
            [i for i in active if i in places]
            for places in (range(consts), range(consts, at_x), range(at_x, len(kinds)))
        )
        kept, whole, stacked = split(residual)
        arriving = with_zeros(cotangents, chosen.schedule.smooth, equation.outvars)

        def step(carry: Any, x: Any) -> tuple[Any, dict[int, Any]]:
            sums, arrived = carry
            (stored, own), rest, dys = x
            state = {i - consts: cotangent for i, cotangent in arrived.items()}
            found = chosen.backward((stored, own | rest | whole), state | dys)
            sums = {i: sums[i] + found[i] for i in summed}
            return (sums, {i: found[i] for i in carried}), {i: found[i] for i in along}

        start = (
            {i: filled(kinds[i], 0.0) for i in summed},
            {i: arriving[i - consts] for i in carried},
        )
        xs = kept, stacked, {i: c for i, c in arriving.items() if i >= carries}
        (sums, first), each = lax.scan(step, start, xs, reverse=not reverse, **options)
        return sums | first | each

    def split(residual: Any) -> tuple[Any, ByPosition, ByPosition]:
        """What each iteration stored, and the arguments of all and of each."""
        kept, held = residual
        whole, stacked = (
            {i: value for i, value in held.items() if (i >= at_x) == of_each}
            for of_each in (False, True)
        )
        return kept, whole, stacked

    return with_derivative(loop, prepare, forward, linear, backward)


def _counts(equation: JaxprEqn, body: Program) -> tuple[int, int]:
    """How many operands of a loop are the same in each iteration, and how many are its state.

    What is looped over, and what each iteration gives, has an axis more than in the body.
    """

    def same_rank(outside: Sequence[Any], inside: Sequence[Any]) -> int:
        pairs = zip(avals(outside), avals(inside), strict=True)
        return sum(one.ndim == other.ndim for one, other in pairs)

    carries = same_rank(equation.outvars, body.results)
    return same_rank(equation.invars, body.arguments) - carries, carries


def _active(body: Program, perturbed: set[int], consts: int, carries: int) -> list[int]:
    """The floating-point arguments of a loop's body that depend on those that are perturbed."""
    found = set(perturbed)
    while True:
        reached = tangents_of(body.equations, [body.arguments[i] for i in found])
        outs = body.results[:carries]
        further = {consts + i for i, v in enumerate(outs) if is_variable(v) and v in reached}
        if further <= found:
            break
        found |= further
    kinds = avals(body.arguments)
    return [i for i in sorted(found) if jnp.issubdtype(kinds[i].dtype, jnp.inexact)]
