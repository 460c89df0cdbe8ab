"""Casts of parameters, which are the same in all iterations of a loop, made once before it.

JAX makes them once where it takes the derivative of a loop, and XLA leaves them where they are.
"""

from collections.abc import Collection

from jax import lax

from jaxcomp._core.made_cast import made_cast
from jaxcomp.transform._choice.graph import plain_nbytes
from jaxcomp.transform._nested.loops import counts
from jaxcomp.transform._program.builder import Builder, flat
from jaxcomp.transform._program.program import Program, avals, variables
from jaxcomp.transform._program.types import Atom, Equation, Variable, is_variable


def with_casts_before(
    builder: Builder, equation: Equation, operands: list[Atom]
) -> tuple[Equation, list[Atom]]:
    """Returns a loop that reads the casts of its constant operands, and its operands.

    Args:
        builder: Builds the program that the loop is in; the casts are added.
        equation: The loop.
        operands: Its operands there.
    """
    body = flat(Program.of(equation.params["jaxpr"]))
    constant, _ = counts(equation, body)
    outside = dict(zip(body.arguments[:constant], operands, strict=False))
    before: list[Atom] = []
    arguments: list[Variable] = []
    inside = Builder()

    def step(inner: Equation, values: list[Atom]) -> list[Atom]:
        if not _narrows(inner, outside):
            return list(inside.add(inner, values))
        (kind,), (wide,) = avals(inner.outvars), (outside[v] for v in variables(inner.invars))
        before.extend(
            builder.trace(lambda x: [lax.stop_gradient(x.astype(kind.dtype))], wide, at=equation)
        )
        arguments.append(Variable(kind))
        return inside.trace(lambda *x: [made_cast(*x)], arguments[-1], *values, at=inner)

    results = inside.inline(body, body.arguments, step)
    if not before:
        return equation, operands
    changed = inside.program(body, [*arguments, *body.arguments], results)
    params = equation.params | {"jaxpr": changed.closed}
    return (
        equation.replace(invars=[*arguments, *equation.invars], params=params),
        [*before, *operands],
    )


def _narrows(equation: Equation, constant: Collection[Variable]) -> bool:
    """Returns whether an equation casts a constant operand to a type of fewer bytes."""
    if equation.primitive.name != "convert_element_type":
        return False
    (wide,), (narrow,) = equation.invars, avals(equation.outvars)
    is_constant = is_variable(wide) and wide in constant
    return is_constant and plain_nbytes(narrow) < plain_nbytes(wide.aval)
