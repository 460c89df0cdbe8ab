"""Finds the pass of each instruction of a training step, and the start of the backward pass."""

from collections import Counter
from collections.abc import Sequence

from jaxcomp.memory._hlo import Module

_NEARLY = 0.9
_SHARE = 0.03  # of the backward instructions: so many depend on a loss
_LEAST_AHEAD = 16


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
    """Returns the point at which the backward pass starts, or that of the first micro-batch.

    XLA may schedule some backward instructions, such as the decoding of a residual, long before
    the first cotangent. The depth of an instruction is the length of the longest chain of forward
    instructions that it depends on. Nearly all backward instructions depend on the loss, and have
    its depth; with accumulated gradients there are several losses. The start is the first backward
    instruction

    - with at least 90% of the depth of the first loss, and of all that is computed before it,
    - after which fewer forward instructions follow than others.

    Args:
        module: the compiled program.
        sequence: the names of its instructions in program order, loop bodies before their loops.

    Returns:
        A position in `sequence`; `None` if there is no backward pass.
    """
    phases, depths, deepest = _depths(module, sequence)
    backward = [point for point, kind in phases.items() if kind == "backward"]
    if not backward:
        return None
    shared = Counter(depths[point] for point in backward)
    first_loss = min(
        (depth for depth, count in shared.items() if count >= _SHARE * len(backward)),
        default=max(shared),
    )
    ahead = max(_LEAST_AHEAD, len(sequence) // 100)
    for point in backward:
        following = Counter(phases.get(p) for p in range(point, point + ahead))
        others = following["backward"] + following["recomputed"]
        least = max(first_loss, deepest[point])
        if depths[point] >= _NEARLY * least and others >= following["forward"]:
            return point
    return next(p for p in backward if depths[p] >= _NEARLY * max(shared))


def _depths(
    module: Module, sequence: Sequence[str]
) -> tuple[dict[int, str], dict[int, int], dict[int, int]]:
    """Returns the phase and the depth of each point, and the greatest depth until there."""
    by_name: dict[str, int] = {}
    phases: dict[int, str] = {}
    depths: dict[int, int] = {}
    deepest: dict[int, int] = {}
    most = 0
    inner = {i.name for c in module.computations.values() for i in c.parameters.values()}
    inner -= {i.name for i in module.entry.parameters.values()}
    for point, name in enumerate(sequence):
        instruction = module.instructions.get(name)
        if instruction is None:
            continue
        if name in inner or instruction.opcode in ("while", "conditional", "call"):
            depth = most  # A loop is taken to depend on all earlier instructions.
        else:
            depth = max((by_name.get(operand, 0) for operand in instruction.operands), default=0)
        phases[point] = phase(instruction.op_name)
        depths[point] = depth
        by_name[name] = depth + (phases[point] == "forward")
        most = deepest[point] = max(most, by_name[name])
    return phases, depths, deepest
