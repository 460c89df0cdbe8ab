"""Finds the pass of each instruction of a training step, and the start of the backward pass."""

from collections.abc import Sequence

from jaxcomp.memory._hlo import Module

_NEARLY = 0.9


def phase(op_name: str) -> str:
    """Returns the pass of a training step that an operation belongs to, from JAX's name stack.

    Args:
        op_name: the name stack and the primitive.

    Returns:
        `forward`, `recomputed` (by `jax.checkpoint`), `backward`, or `other` outside any gradient.

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
    """Returns the point at which the backward pass starts.

    XLA may schedule some backward instructions, such as the decoding of a residual, long before
    the first cotangent. The depth of an instruction is the length of the longest chain of forward
    instructions that it depends on. The start is the first backward instruction with at least 90%
    of the greatest depth.

    Args:
        module: the compiled program.
        sequence: the names of its instructions in program order, loop bodies before their loops.

    Returns:
        A position in `sequence`; `None` if there is no backward pass.
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
            depth = deepest  # A loop is taken to depend on all earlier instructions.
        else:
            depth = max((depths.get(operand, 0) for operand in instruction.operands), default=0)
        kind = phase(instruction.op_name)
        depths[name] = depth + (kind == "forward")
        deepest = max(deepest, depths[name])
        if kind == "backward":
            backward[point] = depth
    longest = max(backward.values(), default=0)
    return next((p for p, depth in backward.items() if depth >= _NEARLY * longest), None)
