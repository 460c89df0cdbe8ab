"""Finds the trip counts of the while loops of an HLO module."""

import re

from jaxcomp.memory._hlo import Computation, Instruction, Module


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Returns the trip count of a while loop.

    Returns:
        The count that XLA recorded; else `(bound - start) / step`, if these are constants; else
        `None`.
    """
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
    step = _step(module, body, counter)
    if start is None or not step or step < 0:
        return None
    return max(0, -(-(bound - start) // step))


def _counter_and_bound(module: Module, condition: Computation) -> tuple[int, int] | None:
    """Returns the numbers `counter` and `bound` of a condition `state[counter] < bound`."""
    compare, operands = _unwrapped(module, condition, condition.root)
    if compare.opcode != "compare" or "direction=LT" not in compare.attributes:
        return None
    left, right = operands
    if left.opcode != "get-tuple-element" or right.opcode != "constant":
        return None
    return left.index, int(right.arguments)


def _unwrapped(
    module: Module, computation: Computation, instruction: Instruction
) -> tuple[Instruction, list[Instruction]]:
    """Returns an instruction and its operands.

    For a fusion, the instruction is the root inside it.
    """
    if instruction.opcode != "fusion":
        return instruction, [computation.instructions[name] for name in instruction.operands]
    inside = module.computations[instruction.called["calls"][0]]
    operands = []
    for name in inside.root.operands:
        operand = inside.instructions[name]
        if operand.opcode == "parameter":
            operand = computation.instructions[instruction.operands[operand.index]]
        operands.append(operand)
    return inside.root, operands


def _element(computation: Computation, tuple_name: str, index: int) -> Instruction:
    """Returns the instruction that computed element `index` of a tuple."""
    made = computation.instructions[tuple_name]
    if made.opcode != "tuple":
        return made
    return computation.instructions[made.operands[index]]


def _constant(computation: Computation, instruction: Instruction) -> int | None:
    """Returns the integer value of a constant or of a copy of a constant; else `None`."""
    while instruction.opcode in ("copy", "bitcast"):
        instruction = computation.instructions[instruction.operands[0]]
    return int(instruction.arguments) if instruction.opcode == "constant" else None


def _step(module: Module, body: Computation, counter: int) -> int | None:
    """Returns the constant that a loop body adds to its counter; `None` if it is not found."""
    if body.root.opcode != "tuple":
        return None
    next_count = body.instructions[body.root.operands[counter]]
    add, operands = _unwrapped(module, body, next_count)
    constants = [int(o.arguments) for o in operands if o.opcode == "constant"]
    return constants[0] if add.opcode == "add" and len(constants) == 1 else None
