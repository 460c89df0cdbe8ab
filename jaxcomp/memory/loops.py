"""Trip counts of the while loops of an HLO module."""

import re

from .hlo import Computation, Instruction, Module


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """How often a while loop runs: what XLA recorded, or `(bound - start) / step` if constant."""
    recorded = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
    if recorded:
        return int(recorded.group(1))
    condition = module.computations[loop.called["condition"][0]]
    body = module.computations[loop.called["body"][0]]
    compared = _counter_and_bound(module, condition)
    if compared is None:
        return None
    counter, bound = compared
    start = _constant(computation, _element(computation, loop.operands[0], counter))
    step = _step(body, counter)
    if start is None or not step or step < 0:
        return None
    return max(0, -(-(bound - start) // step))


def _counter_and_bound(module: Module, condition: Computation) -> tuple[int, int] | None:
    """Of a condition `state[counter] < bound`: the two numbers."""
    scope, compare = condition, condition.root
    if compare.opcode == "fusion":
        scope = module.computations[compare.called["calls"][0]]
        compare = scope.root
    if compare.opcode != "compare" or "direction=LT" not in compare.attributes:
        return None
    values = []
    for name in compare.operands:
        inner = scope.instructions[name]
        if scope is not condition and inner.opcode == "parameter":
            inner = condition.instructions[condition.root.operands[inner.index]]
        values.append(inner)
    left, right = values
    if left.opcode != "get-tuple-element" or right.opcode != "constant":
        return None
    return left.index, int(right.arguments)


def _element(computation: Computation, tuple_name: str, index: int) -> Instruction:
    """The instruction that made element `index` of a tuple."""
    made = computation.instructions[tuple_name]
    if made.opcode != "tuple":
        return made
    return computation.instructions[made.operands[index]]


def _constant(computation: Computation, instruction: Instruction) -> int | None:
    """The integer that an instruction holds, if it is a constant or a copy of one."""
    while instruction.opcode in ("copy", "bitcast"):
        instruction = computation.instructions[instruction.operands[0]]
    return int(instruction.arguments) if instruction.opcode == "constant" else None


def _step(body: Computation, counter: int) -> int | None:
    """What a loop body adds to its counter."""
    if body.root.opcode != "tuple":
        return None
    added = body.instructions[body.root.operands[counter]]
    if added.opcode != "add":
        return None
    constants = [_constant(body, body.instructions[name]) for name in added.operands]
    return next((c for c in constants if c is not None), None)
