"""How the program of an inner `jax.checkpoint` is evaluated: whole, in slices or in chunks."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jaxtyping import Array

from jaxcomp._core.one_device import on_one
from jaxcomp.transform._pieces.chunks import in_chunks
from jaxcomp.transform._pieces.limits import Limits
from jaxcomp.transform._pieces.rounded import with_rounded_operands
from jaxcomp.transform._pieces.slices import Evaluate, in_parts
from jaxcomp.transform._program.program import Program


def in_pieces(
    program: Program, evaluate_program: Callable[..., list[Any]], limits: Limits
) -> Evaluate:
    """Evaluates the program of an inner `jax.checkpoint` in parts, on one GPU in chunks of queries.

    On a TPU rounding takes more cycles than it spares, and so do the smaller products of chunks. A
    CPU cannot compute all products of rounded operands.
    """

    def in_parts_of(program: Program) -> Evaluate:
        return in_parts(program, functools.partial(evaluate_program, program), limits)

    whole = in_parts_of(program)
    if program.jaxpr.effects:
        return whole
    rounded = with_rounded_operands(program)
    others = whole if rounded is program else in_parts_of(rounded)
    chunks = in_chunks(rounded, in_parts_of, limits)
    if chunks is not None:
        others = on_one(None, chunks, others)
    elif rounded is program:
        return whole
    on_cpu = others if rounded is program else whole

    def evaluate(cotangent: Array, values: Sequence[Array]) -> list[Array]:
        forms = {"tpu": whole, "cpu": on_cpu}
        return list(lax.platform_dependent(cotangent, values, **forms, default=others))

    return evaluate
