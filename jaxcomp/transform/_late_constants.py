"""Constant arrays of a backward pass, made no earlier than a cotangent is there.

XLA makes constant arrays, such as the zeros that the sums of a loop begin with, early, and those of
all layers in one kernel, so those of all layers wait for the first.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn
from jaxtyping import Array

from jaxcomp._core import barriers
from jaxcomp._core.one_device import on_one
from jaxcomp._core.shard_map import barrier_by_type
from jaxcomp.memory._tracing import CHECKPOINT_PRIMITIVES
from jaxcomp.transform._builder import flat
from jaxcomp.transform._causal import in_chunks
from jaxcomp.transform._in_parts import Evaluate, in_parts
from jaxcomp.transform._programs import (
    Program,
    Values,
    apply,
    closed,
    is_variable,
    read,
    scope_of,
)
from jaxcomp.transform._rounded import with_rounded_operands

_LARGE = 2**14  # elements


def evaluate_after(program: Program, cotangent: Array, arguments: Sequence[Any]) -> list[Any]:
    """Evaluates a backward program, whose large constant arrays wait for a cotangent.

    Args:
        program: The program.
        cotangent: Axis 0 is the batch; arrays of as many samples wait.
        arguments: Values of its arguments.
    """
    program = flat(program)
    jaxpr = program.jaxpr
    env: Values = dict(zip(jaxpr.constvars, program.consts, strict=True))
    env |= dict(zip(jaxpr.invars, arguments, strict=True))
    for equation in jaxpr.eqns:
        values = [read(env, atom) for atom in equation.invars]
        made = apply_after(cotangent, jaxpr, equation, values)
        env |= dict(zip(equation.outvars, made, strict=True))
    return [read(env, atom) for atom in jaxpr.outvars]


def apply_after(
    cotangent: Array | None, jaxpr: Jaxpr, equation: JaxprEqn, values: list[Any], largest: int = 0
) -> list[Any]:
    """As `programs.apply`, but large constant arrays wait for a cotangent.

    Also those of an inner `jax.checkpoint`, which runs in parts if its arrays have more elements
    than `largest`.
    """
    if cotangent is None or not cotangent.ndim:
        return apply(jaxpr, equation, values)
    if equation.primitive.name in CHECKPOINT_PRIMITIVES:
        if equation.params["prevent_cse"]:
            values = barrier_by_type(values)
        program = flat(closed(equation.params["jaxpr"], ()))
        with scope_of(equation):
            return _in_pieces(program, largest)(cotangent, values)
    if _waits(equation, cotangent):
        (value,), (out,) = values, equation.outvars
        kind: Any = out.aval
        filled = jnp.full(kind.shape, value, kind.dtype)
        return [barriers.decode_after(cotangent, (), lambda _: filled)]
    return apply(jaxpr, equation, values)


def _in_pieces(program: Program, largest: int) -> Evaluate:
    """Evaluates the program of an inner `jax.checkpoint` in parts, on one GPU in chunks of queries.

    On a TPU rounding takes more cycles than it spares, and so do the smaller products of chunks. A
    CPU cannot compute all products of rounded operands.
    """

    def in_parts_of(program: Program) -> Evaluate:
        return in_parts(program, functools.partial(evaluate_after, program), largest)

    whole = in_parts_of(program)
    if program.jaxpr.effects:
        return whole
    rounded = with_rounded_operands(program)
    others = whole if rounded is program else in_parts_of(rounded)
    chunks = in_chunks(rounded, in_parts_of)
    if chunks is not None:
        others = on_one(None, chunks, others)
    elif rounded is program:
        return whole
    on_cpu = others if rounded is program else whole

    def evaluate(cotangent: Array, values: Sequence[Array]) -> list[Array]:
        forms = {"tpu": whole, "cpu": on_cpu}
        return list(lax.platform_dependent(cotangent, values, **forms, default=others))

    return evaluate


def _waits(equation: JaxprEqn, cotangent: Array) -> bool:
    if equation.primitive.name != "broadcast_in_dim" or any(map(is_variable, equation.invars)):
        return False
    kind: Any = equation.outvars[0].aval
    large = kind.size >= _LARGE and cotangent.size > 0
    alike = large and kind.shape[0] == cotangent.shape[0]
    real = all(jnp.issubdtype(a.dtype, jnp.floating) for a in (kind, cotangent))
    return alike and real and not jax.typeof(cotangent).manual_axis_type.varying
