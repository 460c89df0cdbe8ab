"""Runs the linear and the backward program of a schedule, which rebuild what is not stored."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import Array

from jaxcomp._core import barriers, platforms
from jaxcomp.transform._choice.schedule import Coefficient, Schedule
from jaxcomp.transform._execution.rebuild import Rebuild, Residual
from jaxcomp.transform._execution.waiting import apply_after
from jaxcomp.transform._program.primitives import HEAVY, tangents_of
from jaxcomp.transform._program.program import apply, needed, read, readers_of, variables
from jaxcomp.transform._program.types import Atom, Equation, Variable, is_variable

_CONSTRAINT = "sharding_constraint"
_MOVES = ("convert_element_type", "reshape", "transpose", _CONSTRAINT)


def linear(
    schedule: Schedule, stored: Residual, arguments: dict[int, Array], tangents: Sequence[Array]
) -> list[Any]:
    """Runs the linear program.

    Args:
        schedule: What is stored.
        stored: What `forward` returned.
        arguments: The function's arguments that `used_arguments` lists, by position.
        tangents: Of the arguments in `schedule.active`.

    Returns:
        The tangents of the results in `schedule.smooth`.
    """
    rebuild = Rebuild(schedule, stored, arguments)
    coefficients = map(rebuild.plain, schedule.coefficients)
    return schedule.linear(*coefficients, *tangents)


def backward(
    schedule: Schedule, stored: Residual, arguments: dict[int, Array], cotangents: Sequence[Array]
) -> list[Any]:
    """Runs the backward program.

    Args:
        schedule: What is stored.
        stored: What `forward` returned.
        arguments: The function's arguments that `used_arguments` lists, by position.
        cotangents: Of the results in `schedule.smooth`.

    Returns:
        The cotangents of the arguments in `schedule.active`.
    """
    program = schedule.backward
    count = len(schedule.coefficients)
    rebuild = Rebuild(schedule, stored, arguments)
    coefficients = dict(zip(program.arguments, schedule.coefficients, strict=False))
    constants = dict(zip(program.constants, program.consts, strict=True))
    env = constants | dict(zip(program.arguments[count:], cotangents, strict=True))
    # Equations of coefficients alone, evaluated where they are used.
    late: dict[Variable, Equation] = {}
    needed_equations = needed(program.equations, program.results)
    for equation in needed_equations:
        operands = variables(equation.invars)
        is_late = all(v in coefficients or v in late for v in operands)
        if operands and is_late and not equation.effects:
            late |= dict.fromkeys(equation.outvars, equation)
    equations = [e for e in needed_equations if not late.keys() & set(e.outvars)]
    positions = {id(equation): i for i, equation in enumerate(needed_equations)}

    def late_equations(atom: Atom) -> list[Equation]:
        """Returns the late equations that make a value, in their order."""
        found: dict[int, Equation] = {}
        pending = [atom]
        while pending:
            equation = late.get(value) if is_variable(value := pending.pop()) else None
            if equation is not None and positions[id(equation)] not in found:
                found[positions[id(equation)]] = equation
                pending += variables(equation.invars)
        return [found[position] for position in sorted(found)]

    def sources_of(atom: Atom) -> list[Coefficient]:
        """Returns the coefficients that a value is made of, or itself if it is one."""
        read_by_these = [v for e in late_equations(atom) for v in variables(e.invars)]
        return [coefficients[v] for v in [*read_by_these, *variables([atom])] if v in coefficients]

    def evaluate(atom: Atom, get: Callable[[Coefficient], Array]) -> Any:
        made: dict[Variable, Any] = {}

        def value_of(atom: Atom) -> Any:
            if is_variable(atom) and atom in coefficients:
                return get(coefficients[atom])
            if is_variable(atom) and atom in made:
                return made[atom]
            return read(env, atom)

        for equation in late_equations(atom):
            results = apply(equation, list(map(value_of, equation.invars)))
            made |= dict(zip(equation.outvars, results, strict=True))
        return value_of(atom)

    def is_rebuilt(atom: Atom) -> bool:
        return is_variable(atom) and (
            atom in late or (atom in coefficients and rebuild.takes_steps(coefficients[atom]))
        )

    arriving = tangents_of(equations, program.arguments[count:])  # zeros that JAX makes are not
    in_time = any(how.is_on_host for how in schedule.stored.values())
    sums: list[Any] = []
    decoding = [
        e for e in equations if e.primitive.name in HEAVY and any(map(is_rebuilt, e.invars))
    ]
    decoding_ids = {*map(id, decoding)}
    multiplied = {v for e in decoding for v in variables(e.invars)}
    beside = [e for e in equations if _is_sum(e) and multiplied & {*variables(e.invars)}]
    early_ids = {id(e) for e in equations if _is_sum(e)} if in_time else {*map(id, beside)}
    uses: dict[Any, int] = {}
    for equation in equations:
        for atom in variables(equation.invars):
            uses[atom] = uses.get(atom, 0) + 1
    for atom in variables(program.results):
        uses[atom] = uses.get(atom, 0) + 1
    transposes = _transposes(equations, program.results)
    gathers = _gathers(equations, program.results)
    for equation in _gradients_first(equations, [*beside, *decoding], is_rebuilt, env):
        if equation.outvars and equation.outvars[0] in env:
            continue  # a transposition, done with its product
        if id(equation) in gathers:
            env[equation.outvars[0]] = _scattered(equation, read(env, equation.invars[0]))
            continue
        after = _largest([a for a in variables(equation.invars) if a in arriving])
        values = [
            rebuild.after(
                None if after is None else env[after],
                functools.partial(evaluate, atom),
                sources_of(atom),
                atom.aval,
                is_fused=equation.primitive.name not in HEAVY,
            )
            if is_rebuilt(atom)
            else evaluate(atom, rebuild.plain)
            for atom in equation.invars
        ]
        cotangent = None if after is None else env[after]
        results = apply_after(cotangent, equation, values, schedule.limits)
        for atom in variables(equation.invars):
            uses[atom] -= 1
        if id(equation) in early_ids:
            sums += equation.outvars
        if id(equation) in decoding_ids and after is not None and uses[after]:
            if equation.outvars[0] in transposes:
                equation = transposes[equation.outvars[0]]
                results = apply(equation, results)
            # Where XLA waits for copies, it leaves the sums that are gradients for the end.
            early = [env[value] for value in sums]
            (results, early), env[after] = barriers.gradient_before((results, early), env[after])
            env |= dict(zip(sums, early, strict=True))
            sums = []
        env |= dict(zip(equation.outvars, results, strict=True))
    return [evaluate(atom, rebuild.plain) for atom in program.results]


def _largest(cotangents: list[Variable]) -> Any:
    return max(cotangents, key=lambda v: v.aval.size, default=None)


def _is_sum(equation: Equation) -> bool:
    return equation.primitive.name == "reduce_sum"


def _gradients_first(
    equations: list[Equation],
    gradients: list[Equation],
    is_rebuilt: Callable[[Atom], bool],
    env: dict[Variable, Array],
) -> list[Equation]:
    """Puts gradients, some of the equations, before other uses of the same cotangent.

    These are products with rebuilt values, and sums of what they read, as for a bias. So a weight's
    gradient is made while its cotangent is there, not at the end of the backward pass. Sums come
    first: XLA can make them where it makes the cotangent.
    """
    readers = readers_of(gradients)
    available = set(env)
    done: set[int] = set()
    order: list[Equation] = []

    def add(equation: Equation) -> None:
        if id(equation) not in done:
            done.add(id(equation))
            order.append(equation)
            available.update(equation.outvars)

    for equation in equations:
        for atom in variables(equation.invars):
            for reader in readers.get(atom, ()) if atom in available else ():
                rest = [v for v in variables(reader.invars) if not is_rebuilt(v)]
                if available.issuperset(rest):
                    add(reader)
        add(equation)
    return order


def _transposes(equations: list[Equation], results: Sequence[Atom]) -> dict[Variable, Equation]:
    """Returns the transpositions that alone read a value that is no result, by that value.

    XLA makes one of a product a part of the product, unless a barrier stands between them.
    """
    outputs = set(variables(results))
    return {
        value: reading[0]
        for value, reading in readers_of(equations).items()
        if len(reading) == 1 and reading[0].primitive.name == "transpose" and value not in outputs
    }


def _scattered(constraint: Equation, value: Array) -> Any:
    """Returns the gradient of a gathered parameter, without a constraint that would gather it.

    XLA for TPUs would then scatter it in a loop of small products, which takes longer.
    """
    return platforms.constrain_on_tpu(value, lambda value: apply(constraint, [value])[0])


def _gathers(equations: list[Equation], results: Sequence[Atom]) -> set[int]:
    """Returns the `id` of sharding constraints on gradients of gathered parameters.

    They are the transposes of constraints that gather parameters. A gradient would be added up on
    all devices, of which each needs a part.
    """
    constraint_ids: set[int] = set()
    made_by = {v: e for e in equations for v in e.outvars}
    for atom in results:
        constraints: set[int] = set()
        while (equation := made_by.get(atom) if is_variable(atom) else None) is not None:
            if equation.primitive.name in HEAVY:
                constraint_ids |= constraints
            if equation.primitive.name not in _MOVES:
                break
            if equation.primitive.name == _CONSTRAINT:
                constraints.add(id(equation))
            atom = equation.invars[0]
    return constraint_ids


def used_arguments(schedule: Schedule) -> list[int]:
    """Returns the arguments, by position, that the backward pass reads as they are."""
    graph, arguments = schedule.graph, schedule.graph.program.arguments
    seen: set[Any] = set()
    queue = [c.value for c in schedule.coefficients]
    while queue:
        value = queue.pop()
        if is_variable(value) and value not in seen:
            seen.add(value)
            if value not in schedule.stored and value not in graph.held:
                queue += graph.operands(value)
    return [i for i, v in enumerate(arguments) if v in seen and v not in schedule.stored]
