"""What the engine knows of each primitive of JAX: one row in one table."""

import dataclasses
import operator
from collections.abc import Callable, Sequence, Set
from typing import Any, Literal

import jax.numpy as jnp

from jaxcomp._core.made_cast import NAME as MADE_CAST
from jaxcomp.transform._program.types import Atom, Equation, Variable, is_variable


@dataclasses.dataclass(frozen=True)
class Primitive:
    """What a primitive does to values.

    Attributes:
        affine_in: The operands in which it is affine: "all" of them together, any "one" alone, the
            "first" alone, or the "cases" of a selection together; None: it is nonlinear, or makes
            no floating-point numbers.
        is_pointwise: Whether it acts on each element by itself.
        is_move: Whether results are the first operand's values in another place, shape or
            precision.
        cost: "cheap": results may be computed a second time at little more than the cost of
            reading; a "product" or convolution; or a "reduction".
    """

    affine_in: Literal["all", "one", "first", "cases"] | None = None
    is_pointwise: bool = False
    is_move: bool = False
    cost: Literal["cheap", "product", "reduction"] = "cheap"


_MOVE = Primitive("all", is_move=True)
_CAST = Primitive("all", is_pointwise=True, is_move=True)
_SUM = Primitive("all", is_pointwise=True)
_NONLINEAR = Primitive(is_pointwise=True)
_PRODUCT = Primitive(cost="product")
_REDUCTION = Primitive(cost="reduction")

# A primitive that is not here is never computed a second time, and what it reads is exact.
PRIMITIVES = {
    "abs": _NONLINEAR,
    "acos": _NONLINEAR,
    "acosh": _NONLINEAR,
    "add": _SUM,
    "add_any": _SUM,
    "and": _NONLINEAR,
    "argmax": _REDUCTION,
    "argmin": _REDUCTION,
    "asin": _NONLINEAR,
    "asinh": _NONLINEAR,
    "atan": _NONLINEAR,
    "atan2": _NONLINEAR,
    "atanh": _NONLINEAR,
    "bitcast_convert_type": _NONLINEAR,
    "broadcast_in_dim": _MOVE,
    "cbrt": _NONLINEAR,
    "ceil": _NONLINEAR,
    "clamp": _NONLINEAR,
    "complex": _SUM,
    "concatenate": Primitive("all"),
    "conj": _SUM,
    "conv_general_dilated": _PRODUCT,
    "convert_element_type": _CAST,
    "copy": _CAST,
    "cos": _NONLINEAR,
    "cosh": _NONLINEAR,
    "digamma": _NONLINEAR,
    "div": Primitive("first", is_pointwise=True),
    "dot_general": _PRODUCT,
    "dynamic_slice": Primitive("first"),
    "empty": Primitive(),
    "empty2": Primitive(),
    "eq": _NONLINEAR,
    "erf": _NONLINEAR,
    "erf_inv": _NONLINEAR,
    "erfc": _NONLINEAR,
    "exp": _NONLINEAR,
    "exp2": _NONLINEAR,
    "expand_dims": _MOVE,
    "expm1": _NONLINEAR,
    "floor": _NONLINEAR,
    "gather": Primitive("first"),
    "ge": _NONLINEAR,
    "gt": _NONLINEAR,
    "imag": _SUM,
    "integer_pow": _NONLINEAR,
    "iota": Primitive(),
    "is_finite": _NONLINEAR,
    "le": _NONLINEAR,
    "lgamma": _NONLINEAR,
    "log": _NONLINEAR,
    "log1p": _NONLINEAR,
    "logistic": _NONLINEAR,
    "lt": _NONLINEAR,
    MADE_CAST: Primitive("all"),
    "max": _NONLINEAR,
    "min": _NONLINEAR,
    "mul": Primitive("one", is_pointwise=True),
    "name": _CAST,
    "ne": _NONLINEAR,
    "neg": _SUM,
    "nextafter": _NONLINEAR,
    "not": _NONLINEAR,
    "one_minus_square": _NONLINEAR,
    "or": _NONLINEAR,
    "pad": Primitive("first"),
    "polynomial": _NONLINEAR,
    "pow": _NONLINEAR,
    "ragged_dot_general": _PRODUCT,
    "real": _SUM,
    "reduce": _REDUCTION,
    "reduce_and": _REDUCTION,
    "reduce_max": _REDUCTION,
    "reduce_min": _REDUCTION,
    "reduce_or": _REDUCTION,
    "reduce_precision": _MOVE,
    "reduce_prod": _REDUCTION,
    "reduce_sum": _REDUCTION,
    "rem": _NONLINEAR,
    "reshape": _MOVE,
    "rev": _MOVE,
    "round": _NONLINEAR,
    "rsqrt": _NONLINEAR,
    "select_n": Primitive("cases", is_pointwise=True),
    "sharding_constraint": _CAST,
    "shift_left": _NONLINEAR,
    "shift_right_arithmetic": _NONLINEAR,
    "shift_right_logical": _NONLINEAR,
    "sign": _NONLINEAR,
    "sin": _NONLINEAR,
    "sinh": _NONLINEAR,
    "slice": _MOVE,
    "split": _MOVE,
    "sqrt": _NONLINEAR,
    "square": _NONLINEAR,
    "squeeze": _MOVE,
    "stack": Primitive("all"),
    "stop_gradient": _CAST,
    "sub": _SUM,
    "tan": _NONLINEAR,
    "tanh": _NONLINEAR,
    "transpose": _MOVE,
    "unstack": _MOVE,
    "xor": _NONLINEAR,
}


def _names(of: Callable[[Primitive], bool]) -> frozenset[str]:
    return frozenset(name for name, primitive in PRIMITIVES.items() if of(primitive))


MOVES = _names(lambda p: p.is_move)
SUMS = _names(lambda p: p.affine_in == "all" and not p.is_move)
CHEAP = _names(lambda p: p.cost == "cheap")
POINTWISE = _names(lambda p: p.is_pointwise)
HEAVY = _names(lambda p: p.cost == "product")
REDUCTIONS = _names(lambda p: p.cost == "reduction")
# Of a linear program: equations that act on each element by itself, of tangents in their shape.
ELEMENTWISE = _names(lambda p: p.is_pointwise and p.affine_in is not None) - {
    "name",
    "stop_gradient",
}
# What makes numbers that are nonlinear in its operands.
NONLINEAR = _names(lambda p: p.is_pointwise and p.affine_in is None) - {
    *("eq", "ge", "gt", "is_finite", "le", "lt", "ne"),
    *("and", "not", "or", "xor"),
}
_COARSEST = 5, 7  # bits of float16's exponent and of bfloat16's mantissa


def is_cheap(equation: Equation) -> bool:
    """Returns whether results may be computed again at little more than the cost of reading."""
    return equation.primitive.name in CHEAP and not equation.effects


def is_cheap_rule(equation: Equation) -> bool:
    """Returns whether an equation calls a `jax.custom_jvp` function of cheap steps alone."""

    def is_cheap_call(inner: Equation) -> bool:
        called = inner.params.get("jaxpr") or inner.params.get("call_jaxpr")
        if called is None:
            return is_cheap(inner)
        return all(map(is_cheap_call, getattr(called, "jaxpr", called).eqns))

    return equation.primitive.name == "custom_jvp_call" and is_cheap_call(equation)


def is_affine(equation: Equation, lossy: Callable[[Any], bool]) -> bool:
    """Returns whether a cheap equation is affine in its lossy operands, taken together."""
    primitive = PRIMITIVES.get(equation.primitive.name, _NONLINEAR)
    at = [i for i, atom in enumerate(equation.invars) if lossy(atom)]
    if not all(jnp.issubdtype(out.aval.dtype, jnp.inexact) for out in equation.outvars):
        return False
    match primitive.affine_in:
        case "all":
            return not rounds_coarsely(equation)
        case "one":
            return len(at) == 1
        case "first":
            return at == [0]
        case "cases":
            return 0 not in at
    return False


def rounds_coarsely(equation: Equation) -> bool:
    """Returns whether an equation is a cast to fewer digits than bfloat16's, such as `float8`.

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
    """Returns the bits of the exponent and of the mantissa of numbers of a type."""
    kind = jnp.finfo(dtype)
    return int(kind.nexp), int(kind.nmant)


def linear_uses(equation: Equation, tangents: Set[Variable]) -> dict[int, str]:
    """Returns the operands of a linear equation by which it multiplies tangents.

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
    """Returns the variables that depend differentiably on these.

    In a linear program, these are tangents.
    """
    reached = set(tangents)
    for equation in equations:
        if equation.primitive.name == "stop_gradient":
            continue
        if any(_in(atom, reached) for atom in equation.invars):
            reached.update(equation.outvars)
    return reached
