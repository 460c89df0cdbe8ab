"""Which pass of a training step an instruction belongs to, and where the backward pass starts."""

from collections.abc import Sequence

from ._hlo import Module

_NEARLY = 0.9


def phase(op_name: str) -> str:
    """Which pass of a training step an operation belongs to, by JAX's name stack.

    Returns:
        `forward`, `recomputed` (by `jax.checkpoint`), `backward`, or `other` outside of gradients.

    Example:
        >>> phase("jit(step)/transpose(jvp(Net))/conv1/conv_general_dilated")
        'backward'
    """
    if "rematted_computation" in op_name:
        return "recomputed"
    if "transpose(" in op_name:
        return "backward"
    return "forward" if "jvp(" in op_name else "other"


def backward_start(module: Module, sequence: Sequence[str]) -> int | None:
    """The point at which the backward pass starts; None if there is none.

    XLA may schedule what a backward rule needs (a decoded residual) long before any cotangent is
    there. So it is the first backward instruction that depends on (nearly) as long a chain of
    forward instructions as any.

    Args:
        module: the compiled program.
        sequence: names of its instructions in program order, loop bodies before their loops.
    """
    depths: dict[str, int] = {}
    backward: dict[int, int] = {}
    deepest = 0
    inner = {i.name for c in module.computations.values() for i in c.parameters.values()}
    inner -= {i.name for i in module.entry.parameters.values()}
    for point, name in enumerate(sequence):
        instruction = module.instructions.get(name)
        if instruction is None:
            continue
        if name in inner or instruction.opcode in ("while", "conditional", "call"):
            depth = deepest  # a loop waits for all that comes before it
        else:
            depth = max((depths.get(operand, 0) for operand in instruction.operands), default=0)
        kind = phase(instruction.op_name)
        depths[name] = depth + (kind == "forward")
        deepest = max(deepest, depths[name])
        if kind == "backward":
            backward[point] = depth
    longest = max(backward.values(), default=0)
    return next((p for p, depth in backward.items() if depth >= _NEARLY * longest), None)
