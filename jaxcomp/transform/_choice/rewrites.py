"""Second ways to compute a value of the forward program, for when its operands are lossy."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jaxtyping import Array

from jaxcomp.transform._program.builder import Builder
from jaxcomp.transform._program.custom_rules import is_of_jax
from jaxcomp.transform._program.origins import located
from jaxcomp.transform._program.primitives import is_cheap_rule
from jaxcomp.transform._program.program import Program, avals
from jaxcomp.transform._program.types import Atom, Equation, is_variable

_COMPARED = {"max": lax.gt_p, "min": lax.lt_p}


def with_rewrites(forward: Program) -> tuple[Program, dict[Any, Any]]:
    """Adds to a program the values of some equations, made in a way that is affine or open.

    The greater of two values is selected by a mask, which is exact where the values are not. What
    a `jax.custom_jvp` function returns is computed by the function's steps, if these are cheap or
    the function is JAX's own. Any other is one step: its steps do not tell its second derivative.

    Returns:
        The program with more equations, and which of its variables equals which other. An argument
        is none of the others: no equation makes it.
    """
    builder = Builder()
    same: dict[Any, Any] = {}

    def step(equation: Equation, operands: list[Atom]) -> Sequence[Any]:
        results = builder.add(equation, operands)
        if any(result in same for result in results):
            return results  # of an equal equation
        if is_cheap_rule(equation) or is_of_jax(equation):
            opened = located(Program.of(equation.params["call_jaxpr"]), equation)
            same.update(zip(results, builder.inline(opened, operands, step, equation), strict=True))
        elif equation.primitive.name in _COMPARED:
            (kind,) = avals(results)
            if jnp.issubdtype(kind.dtype, jnp.floating):
                key = _COMPARED[equation.primitive.name], kind
                selected = functools.partial(_selected, *key)
                (same[results[0]],) = builder.trace(selected, *operands, at=equation, key=key)
        return results

    arguments = forward.arguments
    results = builder.inline(forward, arguments, step)
    made = {v: other for v, other in same.items() if is_variable(other)}
    same = {v: other for v, other in made.items() if other not in arguments}
    traced = builder.program(forward, arguments, [*results, *same, *same.values()])
    return Program(traced.jaxpr.replace(outvars=results), traced.consts), same


def _selected(compare: Primitive, kind: ShapedArray, *values: Array) -> list[Array]:
    """Returns the greater or the lesser of two values, selected by a mask."""
    first, second = (_broadcast(v, kind.shape) for v in values)
    return [lax.select_n(compare.bind(*values), second, first)]


def _broadcast(value: Array, shape: tuple[int, ...]) -> Array:
    """Returns a scalar or an array of as many axes, in a shape."""
    return lax.broadcast_in_dim(value, shape, range(len(shape) - jnp.ndim(value), len(shape)))
