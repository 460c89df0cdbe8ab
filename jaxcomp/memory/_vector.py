"""Counts the elementwise operations of a compiled program from the text of its HLO module."""

from jaxcomp.memory._hlo import Computation, Instruction, Module, parse
from jaxcomp.memory._traffic import ARITHMETIC, total_over

_ELEMENTWISE = {
    *ARITHMETIC,
    *("clamp", "convert", "is-finite", "reduce-precision", "popcnt", "count-leading-zeros"),
    *("exponential-minus-one", "log-plus-one", "erf", "cbrt", "tan", "atan2"),
    *("round-nearest-even", "round-nearest-afz"),
}


def vector_operations(hlo_text: str) -> int | None:
    """Counts the elementwise operations and reductions of one run of an optimized HLO module.

    An elementwise operation counts once for each element of its result, a reduction once for each
    element that it reads, inside of fusions too. Loops count once per iteration, and a conditional
    counts its largest branch. Matrix products, convolutions, copies and library calls do not count.

    Codes take few bytes and many operations, so a program with codes can be slower on a device of
    high bandwidth although it moves less memory.

    Args:
        hlo_text: the text of a compiled module, `compiled.as_text()`.

    Returns:
        The number of operations; `None` if the trip count of a loop depends on data.

    Raises:
        ValueError: if `hlo_text` is not a compiled HLO module.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jnp.ones((256, 256))
        >>> vector_operations(jax.jit(lambda x: 2 * x + 1).lower(x).compile().as_text())
        131072
    """
    module = parse(hlo_text)
    return total_over(module, module.entry, lambda c, i: operations_of(module, c, i))


def operations_of(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Returns the elementwise operations of one instruction, or of all that it fuses."""
    if instruction.opcode.removesuffix("-start") == "fusion":
        (name,) = instruction.called["calls"]
        fused = module.computations[name]
        return sum(operations_of(module, fused, inner) for inner in fused.instructions.values())
    if instruction.opcode in _ELEMENTWISE:
        return instruction.arrays[0].elements
    if instruction.opcode in ("reduce", "reduce-window"):
        return computation.instructions[instruction.operands[0]].arrays[0].elements
    return 0
