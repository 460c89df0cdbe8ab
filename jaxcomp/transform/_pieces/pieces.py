"""How the program of an inner `jax.checkpoint` is evaluated: whole or in slices."""

import functools
from collections.abc import Callable, Sequence

from jax import lax
from jaxtyping import Array

from jaxcomp.transform._pieces.limits import Limits
from jaxcomp.transform._pieces.rounded import with_rounded_operands
from jaxcomp.transform._pieces.slices import Evaluate, in_parts
from jaxcomp.transform._program.program import Program


def in_pieces(
    program: Program, evaluate_program: Callable[..., list[Array]], limits: Limits
) -> Evaluate:
    """Evaluates the program of an inner `jax.checkpoint` in slices where that is worth it.

    On GPUs operands of products are rounded early. On a TPU that takes more cycles than it spares,
    and a CPU cannot compute all products of rounded operands.
    """

    def in_slices(program: Program) -> Evaluate:
        return in_parts(program, functools.partial(evaluate_program, program), limits)

    whole, rounded = in_slices(program), with_rounded_operands(program)
    if program.jaxpr.effects or rounded is program:
        return whole
    on_gpu = in_slices(rounded)

    def evaluate(cotangent: Array, values: Sequence[Array]) -> list[Array]:
        forms = {"tpu": whole, "cpu": whole}
        return list(lax.platform_dependent(cotangent, values, **forms, default=on_gpu))

    return evaluate
