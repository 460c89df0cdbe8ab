"""Counts HBM traffic and XLA's cycle estimate from the text of an optimized HLO module."""

import re
from collections.abc import Callable

from jaxcomp.memory._hlo import Array, Computation, Instruction, Module, parse
from jaxcomp.memory._loops import trip_count

Count = Callable[[Computation, Instruction], int | None]
_NO_ESTIMATE = 2**63 - 1  # what XLA writes where it has none
Counted = Callable[[Array], bool]  # whether reading and writing an array counts

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
# Elementwise opcodes that compute new values.
ARITHMETIC = {
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
CALLS = {"call", "call-start", "async-start"}


def hbm_traffic(hlo_text: str) -> int | None:
    """Counts the bytes that one run of an optimized HLO module reads from and writes to HBM.

    The rules of the count:

    - Each instruction reads its operands and writes its results. Values inside a fusion cost
      nothing.
    - The body of a loop counts once per iteration. A conditional counts its largest branch.
    - A slice, gather, in-place update or scatter, alone or in a fusion, counts the bytes of the
      slice, not those of the whole buffer.
    - An array counts with the padding of its layout. Elements smaller than a byte count their
      bits.
    - Arrays in host memory, and in the VMEM or SMEM of a TPU, do not count.

    The count ignores caches: every operand is taken to come from HBM. It also ignores the memory
    that a custom call uses internally.

    Args:
        hlo_text: the text of a compiled module, `compiled.as_text()`.

    Returns:
        The number of bytes; `None` if the trip count of a loop depends on data.

    Raises:
        ValueError: if `hlo_text` is not a compiled HLO module.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jnp.ones((256, 256))
        >>> hbm_traffic(jax.jit(lambda x: x + 1).lower(x).compile().as_text())
        524288
    """
    module = parse(hlo_text)
    return total_over(module, module.entry, lambda c, i: traffic_of(module, c, i, in_hbm))


def host_traffic(hlo_text: str) -> int | None:
    """Counts the bytes that one run of an optimized HLO module reads from and writes to the host.

    These are copies of arrays in the host's memory, such as offloaded residuals, by the rules of
    `hbm_traffic`. A value that the program copies back twice counts twice.

    Args:
        hlo_text: the text of a compiled module, `compiled.as_text()`.

    Returns:
        The number of bytes; `None` if the trip count of a loop depends on data.

    Raises:
        ValueError: if `hlo_text` is not a compiled HLO module.
    """
    module = parse(hlo_text)
    return total_over(module, module.entry, lambda c, i: traffic_of(module, c, i, on_host))


def estimated_cycles(hlo_text: str) -> int | None:
    """Sums XLA's estimate of the cycles of a TPU program. Loop bodies count once per iteration.

    The estimate covers matrix and vector instructions. It excludes asynchronous copies and
    collectives. It serves to rank programs, and is not a step time.

    Args:
        hlo_text: the text of a compiled module, `compiled.as_text()`.

    Returns:
        The number of cycles; `None` if the text has no estimate (CPU, GPU), or none for one of the
        instructions, or if the trip count of a loop depends on data.

    Raises:
        ValueError: if `hlo_text` is not a compiled HLO module.
    """
    module = parse(hlo_text)
    return total_over(module, module.entry, lambda c, i: cycles_of(i)) or None


def in_hbm(array: Array) -> bool:
    return array.in_hbm


def on_host(array: Array) -> bool:
    return array.on_host


def cycles_of(instruction: Instruction) -> int | None:
    """Returns XLA's cycle estimate of one instruction, or `None` if XLA does not know."""
    found = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
    cycles = int(found.group(1)) if found else 0
    return None if cycles == _NO_ESTIMATE else cycles


def total_over(module: Module, computation: Computation, count: Count) -> int | None:
    """Returns the sum of `count` over the instructions that run.

    It is `None` if a trip count is not known.
    """
    total = 0
    for instruction in computation.instructions.values():
        called = {
            key: [module.computations[name] for name in names]
            for key, names in instruction.called.items()
        }
        if instruction.opcode == "while":
            once = [total_over(module, c, count) for c in (*called["body"], *called["condition"])]
            part = _times(trip_count(module, computation, instruction), once)
        elif instruction.opcode == "conditional":
            branches = [total_over(module, c, count) for cs in called.values() for c in cs]
            known = [b for b in branches if b is not None]
            part = max(known) if len(known) == len(branches) else None
        elif instruction.opcode in CALLS:
            part = _times(1, [total_over(module, c, count) for cs in called.values() for c in cs])
        else:
            part = count(computation, instruction)
        if part is None:
            return None
        total += part
    return total


def _times(count: int | None, parts: list[int | None]) -> int | None:
    """Returns `count * sum(parts)`; `None` if one of them is `None`."""
    known = [p for p in parts if p is not None]
    return None if count is None or len(known) < len(parts) else count * sum(known)


def traffic_of(
    module: Module, computation: Computation, instruction: Instruction, counted: Counted
) -> int:
    """Returns the bytes that one instruction reads and writes.

    A `-start` reads, and its `-done` writes.
    """
    opcode = instruction.opcode
    if is_free(instruction):
        return 0
    if opcode.endswith("-done"):
        start = _start(computation, instruction)
        followed = start.opcode in CALLS
        return 0 if followed else _written(module, computation, start, instruction, counted)
    read = _read(module, computation, instruction, counted)
    if opcode.endswith("-start"):
        return read
    return read + _written(module, computation, instruction, instruction, counted)


def is_free(instruction: Instruction) -> bool:
    """Returns whether an instruction does no work of its own: it names, allocates or continues."""
    return (
        instruction.opcode in _FREE
        or instruction.opcode.endswith("-update")
        or '"AllocateBuffer"' in instruction.attributes
    )


def _start(computation: Computation, done: Instruction) -> Instruction:
    """Returns the `-start` that belongs to a `-done`."""
    start = computation.instructions[done.operands[0]]
    return start if start.opcode.endswith("-start") else _start(computation, start)


def _read(
    module: Module, computation: Computation, instruction: Instruction, counted: Counted
) -> int:
    """Returns the bytes that an instruction reads."""
    total = 0.0
    for name in dict.fromkeys(instruction.operands):
        size = sum(a.bytes for a in computation.instructions[name].arrays if counted(a))
        total += size * _fraction_used(module, computation, name, instruction)
    return round(total)


def _written(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    result: Instruction,
    counted: Counted,
) -> int:
    """Returns the bytes that are written to the arrays of `result` (itself, or its `-done`)."""
    fractions = _fractions_written(module, computation, instruction)
    if len(fractions) != len(result.arrays):  # A -start also lists its operands and a context.
        fractions = fractions[-1:] * len(result.arrays)
    sizes = [a.bytes if counted(a) else 0 for a in result.arrays]
    return round(sum(f * s for f, s in zip(fractions, sizes, strict=True)))


def _fraction_used(module: Module, computation: Computation, name: str, user: Instruction) -> float:
    """Returns the fraction of the value `name` that `user` reads, from 0 to 1."""
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
    """Returns the first result. The arrays of a `-start` list its operands before its results."""
    is_start = instruction.opcode.endswith("-start")
    return instruction.arrays[len(instruction.operands) if is_start else 0]


def _fraction_read(
    module: Module,
    fused: Computation,
    value: Instruction,
    known: dict[tuple[str, bool], float],
    computed: bool = False,
) -> float:
    """Returns the fraction of `value` that a fused computation reads, from 0 to 1.

    Args:
        module: the module.
        fused: the fused computation.
        value: an instruction of it.
        known: a cache of the fractions, by name and `computed`.
        computed: whether the fusion computes `value`. An update of such a value needs all of its
            elements, because there is no buffer to update in place.
    """
    if (value.name, computed) in known:
        return known[value.name, computed]
    total = 0.0
    for user in fused.users[value.name]:
        updates = user.opcode in _UPDATES and user.operands[0] == value.name
        passes_on = user.opcode in _ELEMENTWISE or (updates and not _leaves(fused, user))
        if updates and computed:
            total = 1.0
        elif user.opcode in ARITHMETIC and not user.is_root:
            total += _fraction_read(module, fused, user, known, computed=True)
        elif passes_on and not user.is_root:
            total += _fraction_read(module, fused, user, known, computed)
        else:
            total += _fraction_used(module, fused, value.name, user)
    known[value.name, computed] = min(1.0, total)
    return known[value.name, computed]


def _leaves(fused: Computation, instruction: Instruction) -> bool:
    """Returns whether `instruction` is a result of its fusion. An update is then done in place."""
    return instruction.is_root or any(
        user.opcode == "tuple" or (user.opcode == "bitcast" and _leaves(fused, user))
        for user in fused.users[instruction.name]
    )


def _fractions_written(
    module: Module, computation: Computation, instruction: Instruction
) -> list[float]:
    """Returns the fraction of each result that is written, less than 1 for in-place updates."""
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
    """Returns the fraction of its buffer that a dynamic-update-slice or scatter writes."""
    position = 1 if update.opcode.startswith("dynamic") else -1
    new = computation.instructions[update.operands[position]].arrays[0].elements
    old = computation.instructions[update.operands[0]].arrays[0].elements
    return min(1.0, new / max(1, old))
