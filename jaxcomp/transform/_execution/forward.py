"""Runs the forward pass of a schedule, which stores what waits."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import DropVar
from jaxtyping import Array, PyTree

from jaxcomp._core import barriers
from jaxcomp._core.custom_derivative import undivided
from jaxcomp._core.shard_map import seed_like
from jaxcomp.codecs import Exact, noise
from jaxcomp.codecs._codec import Seed
from jaxcomp.transform._choice.choice import Stored
from jaxcomp.transform._choice.schedule import Schedule
from jaxcomp.transform._execution.rebuild import Residual
from jaxcomp.transform._program.primitives import HEAVY
from jaxcomp.transform._program.program import (
    apply,
    as_array,
    has_loop,
    needed,
    read,
    readers_of,
    scope_of,
    variables,
)
from jaxcomp.transform._program.types import Equation, Variable


def forward(
    schedule: Schedule, seed: Seed, arguments: Sequence[Array]
) -> tuple[list[Any], Residual]:
    """Runs the forward program.

    Args:
        schedule: What is stored.
        seed: Redraws the rounding noise.
        arguments: The function's.

    Returns:
        The function's results; and, by position in `schedule.stored`, what waits for the backward
        pass.
    """
    program = schedule.graph.program
    results = program.results[: schedule.results]
    equations = _stored_early(
        needed(program.equations, [*results, *schedule.stored]), needed(program.equations, results)
    )
    carriers = _carriers(schedule, equations)
    positions = {value: i for i, value in enumerate(schedule.stored)}
    env = program.environment(arguments)
    seeds = seeds_of(schedule, seed)
    stored: Residual = {}
    waiting: dict[Any, list[Any]] = {}

    def settle(value: Variable) -> None:
        if value in positions:
            storing = schedule.stored[value]
            if storing.codec is not None and carriers[value] is value:
                env[value] = barriers.materialize(env[value])
            number = positions[value]
            stored[number] = encoded(storing, env[value], seeds[number])
            waiting.setdefault(carriers[value], []).append(value)
        for other in waiting.pop(value, ()):
            storing, index = schedule.stored[other], positions[other]
            if storing.codec is not None:
                env[value], stored[index] = barriers.save_residual(
                    env[value], stored[index], storing.codec
                )
            elif storing.offload:
                env[value], stored[index] = barriers.to_host(env[value], stored[index])

    for value in program.arguments:
        settle(value)
    for equation in equations:
        values = [read(env, atom) for atom in equation.invars]
        if has_loop(equation):
            results_of_equation = undivided(functools.partial(apply, equation), values)
        else:
            results_of_equation = apply(equation, values)
        env |= dict(zip(equation.outvars, results_of_equation, strict=True))
        with scope_of(equation):
            for out in equation.outvars:
                settle(out)
    return [as_array(read(env, atom)) for atom in results], stored


def _stored_early(equations: Sequence[Equation], of_results: Sequence[Equation]) -> list[Equation]:
    """Puts equations that serve storing alone, such as a derivative's, where their operands are.

    They come last in the program: nothing would make what they store be stored before that.
    """
    result_ids = set(map(id, of_results))
    extra = [e for e in equations if id(e) not in result_ids]
    made_by_these = {v for e in equations for v in e.outvars}
    missing = {id(e): len(made_by_these.intersection(variables(e.invars))) for e in extra}
    readers = readers_of(extra)
    order: list[Equation] = []

    def add(equation: Equation) -> None:
        """Adds an equation, and then each that it completes, before its next reader."""
        pending = [iter([equation])]
        while pending:
            following = next(pending[-1], None)
            if following is None:
                pending.pop()
                continue
            order.append(following)
            pending.append(completed(following))

    def completed(equation: Equation) -> Iterator[Equation]:
        for value in equation.outvars:
            for reader in readers.get(value, ()):
                missing[id(reader)] -= 1
                if not missing[id(reader)]:
                    yield reader

    of_nothing = [e for e in extra if not missing[id(e)]]
    for equation in (*of_nothing, *of_results):
        add(equation)
    return order


def _carriers(schedule: Schedule, equations: Sequence[Equation]) -> dict[Any, Any]:
    """Returns, for each stored value, the one whose use waits until it is stored.

    That one is written to memory anyway: an operand or a result of a product, or a result of the
    function. A value that is none of these has the next one that is.
    """
    program = schedule.graph.program
    written = set(variables(program.results[: schedule.results]))
    for equation in equations:
        if equation.primitive.name in HEAVY:
            written.update(variables(equation.invars), equation.outvars)
    order = [
        *program.arguments,
        *(v for e in equations for v in e.outvars if not isinstance(v, DropVar)),
    ]
    carriers = {}
    following: Any = None
    for value in reversed(order):
        if value in written:
            following = value
        is_written = value in written or value in program.arguments
        alone = following is None or _varying(following) != _varying(value)
        carriers[value] = value if is_written or alone else following
    return carriers


def _varying(value: Variable) -> Any:
    """Returns the manual mesh axes that a value varies over; a barrier would join those of two."""
    return value.aval.manual_axis_type.varying


def seeds_of(schedule: Schedule, seed: Seed) -> list[list[Array]]:
    """Returns a seed for each code of each stored value."""
    counts = [s.copies if s.is_noisy else 0 for s in schedule.stored.values()]
    seeds = iter(noise.counted(seed, sum(counts), 1))
    return [list(itertools.islice(seeds, count)) for count in counts]


def encoded(storing: Stored, value: Array, seeds: list[Array]) -> PyTree:
    """Returns a value as it waits: a tuple of its codes, or the value as it is."""
    if storing.codec is None:
        return barriers.name_residual(value, Exact())
    own = [seed_like(seed, value) for seed in seeds]
    return tuple(storing.encode(value, seed) for seed in own or (None,))
