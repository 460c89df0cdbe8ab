"""What each primitive does to values: moves them, is elementwise, or affine in some operands."""

import operator
from collections.abc import Callable, Sequence, Set
from typing import Any

import jax.numpy as jnp

from jaxcomp.transform._program.types import Atom, Equation, Variable, is_variable

# Results that are their first operand's values in another place, shape or precision.
MOVES = {
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "expand_dims",
    "name",
    "reduce_precision",
    "reshape",
    "rev",
    "sharding_constraint",
    "slice",
    "squeeze",
    "split",
    "stop_gradient",
    "transpose",
    "unstack",
}
SUMS = {
    "add", "add_any", "sub", "neg", "concatenate", "stack", "real", "imag", "conj", "complex",
}  # fmt: skip
_INDEXED = {"dynamic_slice", "gather"}
_NONLINEAR = {
    "abs", "acos", "acosh", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "bitcast_convert_type", "cbrt", "ceil", "clamp", "cos", "cosh", "digamma", "empty", "empty2",
    "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow",
    "iota", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "ne",
    "nextafter", "not", "one_minus_square", "or", "polynomial", "pow", "rem", "round", "rsqrt",
    "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt",
    "square", "tan", "tanh", "xor",
}  # fmt: skip
_PRODUCTS = {"mul", "div", "select_n", "pad"}
CHEAP = MOVES | SUMS | _INDEXED | _NONLINEAR | _PRODUCTS

# Equations that act on each element by itself.
POINTWISE = (
    SUMS
    | _NONLINEAR
    | _PRODUCTS
    | {"convert_element_type", "copy", "name", "sharding_constraint", "stop_gradient"}
) - {"concatenate", "stack", "empty", "empty2", "iota", "pad"}

_COARSEST = 5, 7  # bits of float16's exponent and of bfloat16's mantissa

HEAVY = {"dot_general", "ragged_dot_general", "conv_general_dilated"}
REDUCTIONS = {
    "argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod",
    "reduce_sum", "reduce",
}  # fmt: skip

# Of a linear program: equations that act on each element by itself, of tangents in their shape.
ELEMENTWISE = {
    "add", "add_any", "convert_element_type", "copy", "div", "mul", "neg", "select_n",
    "sharding_constraint", "sub",
}  # fmt: skip


def is_cheap(equation: Equation) -> bool:
    """Whether results may be computed a second time at little more than the cost of reading."""
    return equation.primitive.name in CHEAP and not equation.effects


def is_cheap_rule(equation: Equation) -> bool:
    """Whether an equation calls a `jax.custom_jvp` function of cheap steps alone."""

    def is_cheap_call(inner: Equation) -> bool:
        called = inner.params.get("jaxpr") or inner.params.get("call_jaxpr")
        if called is None:
            return is_cheap(inner)
        return all(map(is_cheap_call, getattr(called, "jaxpr", called).eqns))

    return equation.primitive.name == "custom_jvp_call" and is_cheap_call(equation)


def is_affine(equation: Equation, lossy: Callable[[Any], bool]) -> bool:
    """Whether a cheap equation is affine in its lossy operands, taken together."""
    name = equation.primitive.name
    at = [i for i, atom in enumerate(equation.invars) if lossy(atom)]
    results: list[Any] = list(equation.outvars)
    if not all(jnp.issubdtype(out.aval.dtype, jnp.inexact) for out in results):
        return False
    if name in MOVES | SUMS:
        return not rounds_coarsely(equation)
    if name == "mul":
        return len(at) == 1
    if name in {"div", "pad"} | _INDEXED:
        return at == [0]
    return name == "select_n" and 0 not in at


def rounds_coarsely(equation: Equation) -> bool:
    """Whether an equation is a cast to numbers of fewer digits than bfloat16's, such as `float8`.

    A cast is a staircase: of a decoded value it has another mean, by up to a step. Casts to
    bfloat16 and float16, which mixed precision has everywhere, count as affine.
    """
    name = equation.primitive.name
    atoms: list[Any] = [*equation.invars, *equation.outvars]
    dtypes = [atom.aval.dtype for atom in atoms]
    is_cast = name in ("convert_element_type", "reduce_precision")
    if not is_cast or not all(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes):
        return False
    before, after = map(_digits, dtypes)
    if name == "reduce_precision":
        after = equation.params["exponent_bits"], equation.params["mantissa_bits"]
    return any(map(operator.lt, after, map(min, before, _COARSEST)))


def _digits(dtype: Any) -> tuple[int, int]:
    """Bits of the exponent and of the mantissa of numbers of a type."""
    kind = jnp.finfo(dtype)
    return int(kind.nexp), int(kind.nmant)


def linear_uses(equation: Equation, tangents: Set[Variable]) -> dict[int, str]:
    """Operands of a linear equation that are coefficients which it multiplies tangents by.

    Args:
        equation: An equation of a linear program.
        tangents: The program's variables that are tangents.

    Returns:
        The role of each such operand, by its position: "operand" of a product or a convolution,
        or "derivative". The sizes of the groups of a ragged product are none.
    """
    name = equation.primitive.name
    roles = {"mul": "derivative", **dict.fromkeys(HEAVY, "operand")}
    if name not in roles:
        return {}
    operands: list[Any] = list(equation.invars)
    return {
        i: roles[name]
        for i, atom in enumerate(operands)
        if not _in(atom, tangents) and jnp.issubdtype(atom.aval.dtype, jnp.inexact)
    }


def _in(atom: Atom, tangents: Set[Variable]) -> bool:
    return is_variable(atom) and atom in tangents


def tangents_of(equations: Sequence[Equation], tangents: Sequence[Variable]) -> set[Variable]:
    """The variables of a program that depend on these ones, such as a linear one's tangents."""
    found = set(tangents)
    for equation in equations:
        if any(_in(atom, found) for atom in equation.invars):
            found.update(equation.outvars)
    return found
