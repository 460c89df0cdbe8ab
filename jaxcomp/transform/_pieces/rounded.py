"""Operands of products, rounded where they are made, as the products would round them."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr
from jaxtyping import Array

from jaxcomp.memory._tracing import CHECKPOINT_PRIMITIVES, inner_jaxprs, open_jaxpr
from jaxcomp.transform._program.builder import Builder
from jaxcomp.transform._program.program import BODIES, Program, avals, with_bodies
from jaxcomp.transform._program.types import Equation

_ALGORITHMS = {lax.DotAlgorithmPreset.BF16_BF16_F32, lax.DotAlgorithmPreset.BF16_BF16_BF16}
_BODIES = BODIES | dict.fromkeys(CHECKPOINT_PRIMITIVES, "jaxpr")


def with_rounded_operands(program: Program) -> Program:
    """Returns a program that rounds float32 operands of bfloat16 products where they are made.

    A product with the algorithm `BF16_BF16_F32` rounds its operands to bfloat16. Rounded before,
    they take half of the bytes, and the product is the same. The cotangents of an attention's
    scores are such operands, of two products each (`jax.nn.dot_product_attention` in bfloat16).
    The bodies of scans, branches and inner `jax.checkpoint`s are rewritten, too.
    """
    if not _rounds(program):
        return program
    builder = Builder()

    def step(equation: Equation, operands: list[Any]) -> Sequence[Any]:
        if _is_rounding(equation):
            (out,) = avals(equation.outvars)
            operands = builder.trace(_rounded, operands, at=equation)
            params = equation.params | {"preferred_element_type": out.dtype}
            equation = equation.replace(params=params)
        elif equation.primitive.name in _BODIES:
            equation = with_bodies(equation, _BODIES[equation.primitive.name], _body)
        return builder.add(equation, operands)

    arguments = program.arguments
    results = builder.inline(program, arguments, step)
    return builder.program(program, arguments, results)


def _rounds(program: Program | Jaxpr) -> bool:
    """Returns whether a product in a program rounds an operand."""
    return any(
        _is_rounding(equation) or any(map(_rounds, inner_jaxprs(equation)))
        for equation in open_jaxpr(program).eqns
    )


def _is_rounding(equation: Equation) -> bool:
    if equation.primitive.name != "dot_general":
        return False
    wide = any(kind.dtype == jnp.float32 for kind in avals(equation.invars))
    return wide and equation.params["precision"] in _ALGORITHMS


def _rounded(operands: list[Array]) -> list[Array]:
    return [x.astype(jnp.bfloat16) for x in operands]


def _body(body: Any) -> Any:
    """Returns the body of a scan, a branch or a `jax.checkpoint`, rewritten."""
    rounded = with_rounded_operands(Program.of(body))
    return rounded.closed if hasattr(body, "consts") else rounded.jaxpr
