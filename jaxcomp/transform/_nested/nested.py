"""Programs whose loops and conditionals store what the policy says of the values in them."""

import dataclasses
from collections.abc import Collection, Sequence

from jaxcomp.transform._choice.context import Context
from jaxcomp.transform._choice.graph import Graph
from jaxcomp.transform._choice.outliers import outliers
from jaxcomp.transform._choice.schedule import schedule
from jaxcomp.transform._nested.bounded import Bounded
from jaxcomp.transform._nested.branches import Conditional, is_conditional
from jaxcomp.transform._nested.casts import with_casts_before
from jaxcomp.transform._nested.kept import Kept
from jaxcomp.transform._nested.loops import Loop, is_loop
from jaxcomp.transform._nested.regions import codec_of_inputs, is_scheduled, with_open_regions
from jaxcomp.transform._nested.scheduled import Outer, ScheduledProgram
from jaxcomp.transform._program.builder import Builder, flat
from jaxcomp.transform._program.primitives import tangents_of
from jaxcomp.transform._program.program import Program, variables
from jaxcomp.transform._program.types import Atom, Equation, is_variable
from jaxcomp.transform._recognition.layer_scale import LayerScale
from jaxcomp.transform._recognition.recognize import recognize
from jaxcomp.transform._recognition.substitute import with_units
from jaxcomp.transform._recognition.unit import Recognized


def scheduled(
    program: Program, active: Sequence[int], coded: Collection[int], context: Context
) -> ScheduledProgram:
    """Schedules a program, the iterations of its loops and its branches."""
    program, regions = with_open_regions(flat(program), active, coded, context, _with_units)
    chosen = _with_units(program, active, coded, context)
    return dataclasses.replace(chosen, regions=tuple(regions))


def _with_units(
    program: Program, active: Sequence[int], coded: Collection[int], context: Context
) -> ScheduledProgram:
    """Schedules a program in which an operation of ours stands for stock ones."""
    units = recognize(program, active, coded, context)
    chosen = _scheduled(program, units, active, coded, context)
    if chosen.schedule.encodes or any(unit.codec is not None for unit in units):
        return chosen
    others = [unit for unit in units if not isinstance(unit.unit, LayerScale)]
    if len(others) == len(units):
        return chosen
    return _scheduled(program, others, active, coded, context)


def _scheduled(
    program: Program,
    units: Sequence[Recognized],
    active: Sequence[int],
    coded: Collection[int],
    context: Context,
) -> ScheduledProgram:
    reached = tangents_of(program.equations, [program.arguments[i] for i in active])
    has_nested = any(
        is_loop(e)
        or is_conditional(e)
        or codec_of_inputs(e, context) is not None
        or is_scheduled(e, reached, context.limits)
        for e in program.equations
    )
    takes_seed = bool(units) or has_nested
    if takes_seed:
        program = with_units(program, units)
    context = context.around(program)
    large = outliers(program, context.outliers).held if has_nested and context.encodes else {}
    outer = Outer(context, scheduled, [], large)
    if has_nested:
        program = _with_nested(program, active, coded, outer)
    of_program = schedule(program, active, coded, context)
    return ScheduledProgram(of_program, tuple(outer.nested), tuple(units), takes_seed)


def _with_nested(
    program: Program, active: Sequence[int], coded: Collection[int], outer: Outer
) -> Program:
    """Returns the program, whose last argument is a seed, with our loops and conditionals in it."""
    reached = tangents_of(program.equations, [program.arguments[i] for i in active])
    numbers = {id(equation): number for number, equation in enumerate(program.equations)}
    held = {v for i, v in enumerate(program.arguments) if i not in coded}
    free = Graph(program, held).free
    builder = Builder()
    *_, seed = arguments = program.arguments

    def step(equation: Equation, operands: list[Atom]) -> Sequence[Atom]:
        if reached.isdisjoint(variables(equation.invars)):
            return builder.add(equation, operands)
        number = numbers[id(equation)]
        is_free = [not is_variable(v) or v in free for v in equation.invars]
        if is_loop(equation):
            equation, operands = with_casts_before(builder, equation, operands)
            is_free = [True] * (len(operands) - len(is_free)) + is_free
        nested: Loop | Conditional | Bounded | Kept
        if is_loop(equation):
            nested = Loop(equation, number, is_free, outer)
        elif is_conditional(equation):
            nested = Conditional(equation, number, is_free, outer)
        elif (codec := codec_of_inputs(equation, outer.context)) is not None:
            nested = Bounded(equation, number, is_free, outer, codec)
        elif is_scheduled(equation, reached, outer.context.limits):
            nested = Kept(equation, number, is_free, outer)
        else:
            return builder.add(equation, operands)
        return builder.trace(nested, seed, *operands, at=equation)

    results = builder.inline(program, arguments, step)
    return builder.program(program, arguments, results)
