"""HBM traffic and XLA's cycle estimate, counted from the text of an optimised HLO module."""

import re
from collections.abc import Callable

from ._hlo import Array, Computation, Instruction, Module, parse
from ._loops import trip_count

Cost = Callable[[Computation, Instruction], int]

_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "opt-barrier",
    "after-all",
    "add-dependency",
    "partition-id",
    "replica-id",
}
_ELEMENTWISE = {"bitcast", "convert", "copy", "pad", "reshape", "transpose"}
# What makes new elements, each of one element of an operand.
_ARITHMETIC = {
    *("add", "subtract", "multiply", "divide", "remainder", "maximum", "minimum", "power"),
    *("and", "or", "xor", "not", "shift-left", "shift-right-logical", "shift-right-arithmetic"),
    *(
        "negate",
        "abs",
        "sign",
        "exponential",
        "log",
        "sqrt",
        "rsqrt",
        "tanh",
        "logistic",
        "sine",
        "cosine",
    ),
    *("compare", "select", "floor", "ceil", "bitcast-convert"),
}
_SLICES = {"slice", "dynamic-slice", "gather"}
_UPDATES = {"dynamic-update-slice", "scatter"}
_CALLS = {"call", "call-start", "async-start"}


def hbm_traffic(hlo_text: str) -> int | None:
    """Bytes that one run of an optimised HLO module reads from and writes to HBM.

    Each instruction that runs is charged its operands and its results. What a fusion computes
    inside is free, loop bodies are charged by trip count, of a conditional the largest branch.
    Slices, gathers, in-place updates and scatters, alone or inside a fusion, are charged by the
    slice and not by the whole buffer. Arrays count with their layout's padding and sub-byte
    elements with their bits; arrays in a TPU's VMEM or SMEM and in host memory are not in HBM.

    Not counted: caches (every operand is taken to come from HBM), and memory used inside a
    custom call.

    Args:
        hlo_text: text of a compiled module, `compiled.as_text()`.

    Returns:
        Bytes; None if a loop's trip count depends on data.

    Raises:
        ValueError: if `hlo_text` is not a compiled HLO module.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jnp.ones((256, 256))
        >>> hbm_traffic(jax.jit(lambda x: x + 1).lower(x).compile().as_text())
        524288
    """
    module = parse(hlo_text)
    return _total(module, module.entry, lambda c, i: _instruction_traffic(module, c, i))


def estimated_cycles(hlo_text: str) -> int | None:
    """XLA's own estimate of a TPU program's cycles, loop bodies by trip count.

    The estimate covers compute and vector instructions, not copies in flight nor collectives:
    it ranks programs, it is not a step time.

    Args:
        hlo_text: text of a compiled module, `compiled.as_text()`.

    Returns:
        Cycles; None if the text carries no estimate (CPU, GPU) or if a loop's trip count
        depends on data.

    Raises:
        ValueError: if `hlo_text` is not a compiled HLO module.
    """
    module = parse(hlo_text)
    return _total(module, module.entry, lambda c, i: _cycles(i)) or None


def _cycles(instruction: Instruction) -> int:
    found = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
    return int(found.group(1)) if found else 0


def _total(module: Module, computation: Computation, cost: Cost) -> int | None:
    """Sum of `cost` over the instructions that run; None if a trip count is unknown."""
    total = 0
    for instruction in computation.instructions.values():
        called = {
            key: [module.computations[name] for name in names]
            for key, names in instruction.called.items()
        }
        if instruction.opcode == "while":
            once = [_total(module, c, cost) for c in (*called["body"], *called["condition"])]
            part = _times(trip_count(module, computation, instruction), once)
        elif instruction.opcode == "conditional":
            branches = [_total(module, c, cost) for cs in called.values() for c in cs]
            known = [b for b in branches if b is not None]
            part = max(known) if len(known) == len(branches) else None
        elif instruction.opcode in _CALLS:
            part = _times(1, [_total(module, c, cost) for cs in called.values() for c in cs])
        else:
            part = cost(computation, instruction)
        if part is None:
            return None
        total += part
    return total


def _times(count: int | None, parts: list[int | None]) -> int | None:
    known = [p for p in parts if p is not None]
    return None if count is None or len(known) < len(parts) else count * sum(known)


def _instruction_traffic(module: Module, computation: Computation, instruction: Instruction) -> int:
    opcode = instruction.opcode
    if opcode in _FREE or '"AllocateBuffer"' in instruction.attributes:
        return 0
    if opcode.endswith("-update"):
        return 0
    if opcode.endswith("-done"):
        start = _start(computation, instruction)
        followed = start.opcode in _CALLS
        return 0 if followed else _written(module, computation, start, instruction)
    read = _read(module, computation, instruction)
    if opcode.endswith("-start"):
        return read
    return read + _written(module, computation, instruction, instruction)


def _start(computation: Computation, done: Instruction) -> Instruction:
    """The `-start` of an asynchronous pair."""
    start = computation.instructions[done.operands[0]]
    return start if start.opcode.endswith("-start") else _start(computation, start)


def _read(module: Module, computation: Computation, instruction: Instruction) -> int:
    total = 0.0
    for name in dict.fromkeys(instruction.operands):
        size = sum(a.bytes for a in computation.instructions[name].arrays if a.in_hbm)
        total += size * _fraction_used(module, computation, name, instruction)
    return round(total)


def _written(
    module: Module, computation: Computation, instruction: Instruction, result: Instruction
) -> int:
    """Bytes that `instruction` writes to the arrays of `result` (itself, or its `-done`)."""
    fractions = _fractions_written(module, computation, instruction)
    if len(fractions) != len(result.arrays):  # a -start also lists its operands and a context
        fractions = fractions[-1:] * len(result.arrays)
    sizes = [a.bytes if a.in_hbm else 0 for a in result.arrays]
    return round(sum(f * s for f, s in zip(fractions, sizes, strict=True)))


def _fraction_used(module: Module, computation: Computation, name: str, user: Instruction) -> float:
    """The part of the value `name` that `user` reads, from 0 to 1."""
    opcode = user.opcode.removesuffix("-start")
    is_first = user.operands.index(name) == 0 and user.operands.count(name) == 1
    if opcode == "fusion":
        (fused,) = (module.computations[c] for c in user.called["calls"])
        places = [k for k, operand in enumerate(user.operands) if operand == name]
        known: dict[tuple[str, bool], float] = {}
        parts = (_fraction_read(module, fused, fused.parameters[k], known) for k in places)
        return min(1.0, sum(parts))
    if is_first and opcode in _SLICES:
        return _result(user).elements / max(1, computation.instructions[name].arrays[0].elements)
    if is_first and opcode == "scatter":
        return _updated(computation, user)
    if is_first and opcode == "dynamic-update-slice":
        return 0.0
    return 1.0


def _result(instruction: Instruction) -> Array:
    """The first result; the arrays of a `-start` list its operands before it."""
    is_start = instruction.opcode.endswith("-start")
    return instruction.arrays[len(instruction.operands) if is_start else 0]


def _fraction_read(
    module: Module,
    fused: Computation,
    value: Instruction,
    known: dict[tuple[str, bool], float],
    computed: bool = False,
) -> float:
    """The part of `value` that a fused computation needs, from 0 to 1.

    A value that is computed in the fusion is no buffer: an update of it needs all of it. `known`
    takes each answer once, however many ways lead to a value.
    """
    if (value.name, computed) in known:
        return known[value.name, computed]
    total = 0.0
    for user in fused.users[value.name]:
        updates = user.opcode in _UPDATES and user.operands[0] == value.name
        passes_on = user.opcode in _ELEMENTWISE or (updates and not _leaves(fused, user))
        if updates and computed:
            total = 1.0
        elif user.opcode in _ARITHMETIC and not user.is_root:
            total += _fraction_read(module, fused, user, known, computed=True)
        elif passes_on and not user.is_root:
            total += _fraction_read(module, fused, user, known, computed)
        else:
            total += _fraction_used(module, fused, value.name, user)
    known[value.name, computed] = min(1.0, total)
    return known[value.name, computed]


def _leaves(fused: Computation, instruction: Instruction) -> bool:
    """Whether `instruction` is a result of its fusion, and so updates a buffer in place."""
    return instruction.is_root or any(
        user.opcode == "tuple" or (user.opcode == "bitcast" and _leaves(fused, user))
        for user in fused.users[instruction.name]
    )


def _fractions_written(
    module: Module, computation: Computation, instruction: Instruction
) -> list[float]:
    """The part of each result that `instruction` writes: less than 1 for in-place updates."""
    opcode = instruction.opcode.removesuffix("-start")
    if opcode == "fusion":
        (fused,) = (module.computations[c] for c in instruction.called["calls"])
        return _fractions_written(module, fused, fused.root)
    if opcode == "tuple":
        parts = [computation.instructions[name] for name in instruction.operands]
        return [f for part in parts for f in _fractions_written(module, computation, part)]
    if opcode == "bitcast":
        (name,) = instruction.operands
        return _fractions_written(module, computation, computation.instructions[name])
    if opcode in _UPDATES:
        return [_updated(computation, instruction)] * len(instruction.arrays)
    return [1.0] * len(instruction.arrays)


def _updated(computation: Computation, update: Instruction) -> float:
    """The part of its buffer that a dynamic-update-slice or scatter writes."""
    position = 1 if update.opcode.startswith("dynamic") else -1
    new = computation.instructions[update.operands[position]].arrays[0].elements
    old = computation.instructions[update.operands[0]].arrays[0].elements
    return min(1.0, new / max(1, old))
