"""Counts the FLOPs of the products in a compiled program, from the text of its HLO module."""

import re
from math import prod

from jaxcomp.memory._hlo import Computation, Instruction, Module

_CONTRACTED = re.compile(r"lhs_contracting_dim(?:ension)?s\"?[=:][{\[]([\d,\"]*)[}\]]")
_LABELS = re.compile(r"dim_labels=\w+_(\w+)->(\w+)")
# The position of the kernel and of the convolution's output among the operands and the result.
_CONVOLUTIONS = {
    "__cudnn$convForward": (1, 2),
    "__cudnn$convBackwardInput": (1, 0),
    "__cudnn$convBackwardFilter": (2, 1),
}


def products_of(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Returns the FLOPs of the matrix products and convolutions of one instruction.

    The products that a fusion contains count. A convolution counts the products with its padding,
    too. Other library calls and kernels of other makers count as 0.
    """
    if instruction.opcode == "fusion":
        (name,) = instruction.called["calls"]
        fused = module.computations[name]
        return sum(products_of(module, fused, inner) for inner in fused.instructions.values())
    contracted = _CONTRACTED.search(instruction.attributes)
    if contracted:
        left = computation.instructions[instruction.operands[0]].arrays[0].dims
        axes = map(int, re.findall(r"\d+", contracted.group(1)))
        return 2 * instruction.arrays[0].elements * prod(left[axis] for axis in axes)
    labels = _LABELS.search(instruction.attributes)
    if labels is None:
        return 0
    target = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
    kernel_at, output_at = _CONVOLUTIONS.get(target.group(1) if target else "", (1, 2))
    operands = (computation.instructions[name].arrays[0] for name in instruction.operands[:2])
    arrays = [*operands, instruction.arrays[0]]
    channels = arrays[output_at].dims[labels.group(2).index("f")]
    return 2 * arrays[kernel_at].elements * (arrays[output_at].elements // max(1, channels))
