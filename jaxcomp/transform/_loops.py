"""`scan` loops inside of a function: each iteration stores what the policy says of its values."""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn, jaxpr_as_fun

from jaxcomp._core.shard_map import vary_like
from jaxcomp.codecs import noise
from jaxcomp.codecs._codec import Seed
from jaxcomp.policies._policy import has_codecs
from jaxcomp.transform import _passes as passes
from jaxcomp.transform._algebra import tangents_of
from jaxcomp.transform._builder import Builder, flat
from jaxcomp.transform._decisions import PolicyLog
from jaxcomp.transform._graph import LOOP, Graph
from jaxcomp.transform._linear_map import ByPosition
from jaxcomp.transform._programs import (
    Program,
    avals,
    filled,
    is_of_collective,
    is_variable,
    variables,
)
from jaxcomp.transform._rules import with_both_modes, with_reverse_mode
from jaxcomp.transform._schedule import Schedule, schedule
from jaxcomp.transform._units import Recognized, recognize
from jaxcomp.transform._with_units import with_units

_SCAN = "scan"
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True, eq=False)
class Loop:
    """A loop whose iterations store by a schedule of their own.

    Attributes:
        body: Of one iteration.
        length: Number of iterations.
        name: That its stored values have.
    """

    body: "Looped"
    length: int
    name: str


@dataclasses.dataclass(frozen=True, eq=False)
class Looped:
    """The schedule of a program, and of the loops in it.

    Attributes:
        schedule: Of the program, in which a loop is a function with a backward pass of its own.
        loops: Those that store something.
        units: Stock operations that an operation of `jaxcomp.ops` stands for.
        takes_seed: Whether the schedule's program has the seed as its last argument, for its loops
            and units.
    """

    schedule: Schedule
    loops: tuple[Loop, ...]
    units: tuple[Recognized, ...]
    takes_seed: bool

    @classmethod
    def of(
        cls, program: Program, active: Sequence[int], coded: Collection[int], log: PolicyLog
    ) -> "Looped":
        """As `schedule`, for a program and each iteration of its loops."""
        program = flat(program)
        units = recognize(program, active, log)
        loops: list[Loop] = []
        has_loops = any(map(_is_loop, program.jaxpr.eqns))
        takes_seed = bool(units) or has_loops
        if takes_seed:
            program = with_units(program, units)
        if has_loops:
            program = _with_coded_loops(program, active, coded, log, loops)
        chosen = schedule(program, active, coded, log)
        return cls(chosen, tuple(loops), tuple(units), takes_seed)

    def forward(self, seed: Seed, arguments: Sequence[Any]) -> tuple[list[Any], Any]:
        """As `_passes.forward`; saved values come with the arguments that are read again."""
        if self.takes_seed:
            own = jnp.asarray(0 if seed is None else seed).astype(jnp.uint32)
            arguments = [*arguments, vary_like(own, arguments)]
        made, stored = passes.forward(self.schedule, seed, arguments)
        return made, (stored, {i: arguments[i] for i in passes.used_arguments(self.schedule)})

    def linear(self, residual: Any, tangents: Sequence[Any]) -> list[Any]:
        """The tangents of the results in `schedule.smooth`, from those of the active arguments.

        For schedules that encode nothing.
        """
        stored, used = residual
        return passes.linear(self.schedule, stored, used, tangents)

    def backward(self, residual: Any, cotangents: ByPosition) -> list[Any]:
        """The cotangents of the active arguments, from those of the results."""
        arriving = _arriving(cotangents, self.schedule.smooth, self.schedule.graph.jaxpr.outvars)
        stored, used = residual
        return passes.backward(self.schedule, stored, used, list(arriving.values()))


def _arriving(cotangents: ByPosition, smooth: Sequence[int], results: Sequence[Any]) -> ByPosition:
    """The cotangents of the results that have one, with zeros as arrays.

    `jax.vjp` also takes a Python scalar for one.
    """
    return {
        i: jnp.asarray(cotangents[i], results[i].aval.dtype)
        if i in cotangents
        else filled(results[i].aval, 0.0)
        for i in smooth
    }


def _is_loop(equation: JaxprEqn) -> bool:
    """Whether it is a `scan` whose only effects, if any, are those of collectives."""
    return equation.primitive.name == _SCAN and all(map(is_of_collective, equation.effects))


def _with_coded_loops(
    program: Program,
    active: Sequence[int],
    coded: Collection[int],
    log: PolicyLog,
    loops: list[Loop],
) -> Program:
    """The program, whose last argument is a seed, with a backward pass of ours for each loop."""
    jaxpr = program.jaxpr
    reached = tangents_of(jaxpr.eqns, [jaxpr.invars[i] for i in active])
    numbers = {id(equation): number for number, equation in enumerate(jaxpr.eqns)}
    held = {v for i, v in enumerate(jaxpr.invars) if i not in coded}
    free = Graph(jaxpr, held).free
    builder = Builder()
    *_, seed = arguments = jaxpr.invars

    def step(equation: JaxprEqn, operands: list[Any]) -> list[Any]:
        if not _is_loop(equation) or reached.isdisjoint(variables(equation.invars)):
            return builder.add(equation, operands)
        is_free = [not is_variable(v) or v in free for v in equation.invars]
        loop = _coded_loop(equation, numbers[id(equation)], is_free, log, loops)
        return builder.trace(loop, seed, *operands, at=equation)

    results = builder.inline(program, arguments, step)
    return builder.program(jaxpr, arguments, results)


def _coded_loop(
    equation: JaxprEqn, number: int, is_free: list[bool], log: PolicyLog, loops: list[Loop]
) -> Callable[..., list[Any]]:
    """A loop as a function of a seed and its operands, of which some are free to be had again."""
    body, length = equation.params["jaxpr"], equation.params["length"]
    consts, carries = _counts(equation, body)
    options = {"length": length, "unroll": equation.params["unroll"]}
    reverse = equation.params["reverse"]
    at_x = consts + carries
    coded = [i for i in range(consts, len(is_free)) if i < at_x or not is_free[i]]
    kinds = avals(body.jaxpr.invars)
    encodes = has_codecs(log.policy)

    def loop(seed: Any, *values: Any) -> list[Any]:
        def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            made = list(jaxpr_as_fun(body)(*values[:consts], *carry, *x))
            return made[:carries], made[carries:]

        rest = list(values[at_x:])
        final, ys = lax.scan(step, list(values[consts:at_x]), rest, reverse=reverse, **options)
        return [*final, *ys]

    def forward(
        seed: Any, values: list[Any], perturbed: list[int]
    ) -> tuple[list[Any], Looped, Any]:
        active = _active(body.jaxpr, {*perturbed}, consts, carries)
        chosen = Looped.of(_scoped(body, equation), active, coded, log.inside(length))
        loops.append(Loop(chosen, length, f"{LOOP}{next(_numbers)}"))

        def step(carry: Any, x: list[Any]) -> tuple[Any, Any]:
            index, state = carry
            of_iteration = noise.folded(noise.folded(seed, number), index) if encodes else None
            made, (stored, used) = chosen.forward(of_iteration, [*values[:consts], *state, *x])
            own = {i: value for i, value in used.items() if not is_held(i)}
            return (index + jnp.uint32(1), made[:carries]), (made[carries:], (stored, own))

        start = jnp.uint32(0), values[consts:at_x]
        (count, final), (ys, kept) = lax.scan(
            step, start, values[at_x:], reverse=reverse, **options
        )
        # No policy decides about values that are ours by this name, such as the iteration count.
        kept, _ = jax.tree.map(lambda leaf: checkpoint_name(leaf, loops[-1].name), (kept, count))
        used = passes.used_arguments(chosen.schedule)
        held = {i: values[i] for i in used if is_held(i)}
        return [*final, *ys], chosen, (kept, held)

    def is_held(i: int) -> bool:
        """Whether what the backward pass reads is an operand of the loop, and not its own seed.

        It never reads a carry as it is: an iteration stores what it needs of it.
        """
        return i < len(kinds)

    def linear(chosen: Looped, residual: Any, given: ByPosition) -> ByPosition:
        smooth, active = chosen.schedule.smooth, chosen.schedule.active
        kept, whole, stacked = parts(residual)
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
            made = chosen.linear((stored, own | rest | whole), [moves[i] for i in active])
            found = dict(zip(smooth, made, strict=True))
            return {i: found[i - consts] for i in state}, {
                i: move for i, move in found.items() if i >= carries
            }

        final, each = lax.scan(step, start, (kept, stacked, along), reverse=reverse, **options)
        still = {i: filled(equation.outvars[i].aval, 0.0) for i in smooth}
        return still | {i - consts: move for i, move in final.items()} | each

    def backward(chosen: Looped, residual: Any, cotangents: ByPosition) -> ByPosition:
        active = chosen.schedule.active
        summed, carried, along = (
            [i for i in active if i in places]
            for places in (range(consts), range(consts, at_x), range(at_x, len(kinds)))
        )
        kept, whole, stacked = parts(residual)
        arriving = _arriving(cotangents, chosen.schedule.smooth, equation.outvars)

        def step(carry: Any, x: Any) -> tuple[Any, dict[int, Any]]:
            sums, arrived = carry
            (stored, own), rest, dys = x
            state = {i - consts: cotangent for i, cotangent in arrived.items()}
            made = chosen.backward((stored, own | rest | whole), state | dys)
            found = dict(zip(active, made, strict=True))
            sums = {i: sums[i] + found[i] for i in summed}
            return (sums, {i: found[i] for i in carried}), {i: found[i] for i in along}

        start = (
            {i: filled(kinds[i], 0.0) for i in summed},
            {i: arriving[i - consts] for i in carried},
        )
        xs = kept, stacked, {i: c for i, c in arriving.items() if i >= carries}
        (sums, first), each = lax.scan(step, start, xs, reverse=not reverse, **options)
        return sums | first | each

    def parts(residual: Any) -> tuple[Any, ByPosition, ByPosition]:
        """What each iteration stored, and the arguments of all and of each."""
        kept, held = residual
        whole, stacked = (
            {i: value for i, value in held.items() if (i >= at_x) == of_each}
            for of_each in (False, True)
        )
        return kept, whole, stacked

    if encodes:
        return with_reverse_mode(loop, forward, backward, len(kinds))
    return with_both_modes(loop, forward, linear, backward)


def _scoped(program: Program, equation: JaxprEqn) -> Program:
    """A program that an equation calls, with the equation's name scope around each of its own."""
    builder = Builder()
    arguments = program.jaxpr.invars
    results = builder.inline(program, arguments, call=equation)
    return builder.program(program.jaxpr, arguments, results)


def _counts(equation: JaxprEqn, body: Program) -> tuple[int, int]:
    """How many operands of a loop are the same in each iteration, and how many are its state.

    What is looped over, and what each iteration gives, has an axis more than in the body.
    """

    def same_rank(outside: Sequence[Any], inside: Sequence[Any]) -> int:
        pairs = zip(avals(outside), avals(inside), strict=True)
        return sum(one.ndim == other.ndim for one, other in pairs)

    carries = same_rank(equation.outvars, body.jaxpr.outvars)
    return same_rank(equation.invars, body.jaxpr.invars) - carries, carries


def _active(jaxpr: Any, perturbed: set[int], consts: int, carries: int) -> list[int]:
    """The floating-point arguments of a loop's body that depend on those that are perturbed."""
    found = set(perturbed)
    while True:
        reached = tangents_of(jaxpr.eqns, [jaxpr.invars[i] for i in found])
        outs = jaxpr.outvars[:carries]
        further = {consts + i for i, v in enumerate(outs) if is_variable(v) and v in reached}
        if further <= found:
            break
        found |= further
    kinds = avals(jaxpr.invars)
    return [i for i in sorted(found) if jnp.issubdtype(kinds[i].dtype, jnp.inexact)]
