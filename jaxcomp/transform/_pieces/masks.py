"""Finds scores of an attention that a constant mask hides."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxcomp.transform._pieces.axes import WholeError
from jaxcomp.transform._program.constants import value_of
from jaxcomp.transform._program.program import Program
from jaxcomp.transform._program.types import Equation, is_variable

Values = Mapping[Any, np.ndarray[Any, Any]]

_HIDDEN = -1e30  # of a hidden score, at most; no product of queries and keys comes near
_UNARY = {
    "convert_element_type", "copy", "name", "neg", "reduce_precision", "reshape", "squeeze",
    "tanh", "transpose",
}  # fmt: skip


def masked_scores(
    program: Program, constants: Values
) -> tuple[Any, tuple[int, int], np.ndarray[Any, Any]]:
    """Scores of which a constant mask hides some, such as a causal one.

    They are products, scaled or capped, of which a constant selects some and puts a large negative
    number in place of the others, or to which it adds one. A mask that depends on data is none: it
    may hide all keys that a constant one shows.

    Args:
        program: The program.
        constants: Values of its constants.

    Returns:
        The variable of the masked scores, its axes of queries and of keys, and which scores are
        hidden.

    Raises:
        WholeError: If there are no such scores.
    """
    for equation in program.equations:
        hidden = _hidden(equation, constants, program.made_by)
        if hidden is not None:
            axes = [i for i, size in enumerate(hidden.shape) if size > 1]
            if len(axes) == 2:
                return equation.outvars[0], (axes[0], axes[1]), hidden.squeeze()
    raise WholeError("no constant mask of scores")


def _hidden(equation: Equation, constants: Values, made_by: dict[Any, Equation]) -> Any:
    """Returns which scores an equation hides; None if it is no mask of scores."""
    name = equation.primitive.name
    if name not in ("select_n", "add") or equation.outvars[0] in constants:
        return None
    values = [value_of(v, constants) for v in equation.invars]
    if name == "add":
        for value, other in zip(values, equation.invars[::-1], strict=True):
            if value is not None and _is_product(other, constants, made_by):
                return _is_hidden(value)
        return None
    which, *cases = values
    if which is None or which.dtype != bool:
        return None
    for case, (value, other) in enumerate(zip(cases, equation.invars[:0:-1], strict=True)):
        large = value is not None and np.all(_is_hidden(value))
        if large and _is_product(other, constants, made_by):
            return which == bool(case)
    return None


def _is_hidden(value: np.ndarray[Any, Any]) -> Any:
    return value.astype(np.float64) <= _HIDDEN  # which float16 does not have


def _is_product(atom: Any, constants: Values, made_by: dict[Any, Equation]) -> bool:
    """Returns whether a value is a product of arrays, scaled or capped."""
    while is_variable(atom) and atom in made_by:
        equation = made_by[atom]
        name = equation.primitive.name
        if name == "dot_general":
            return True
        others = [v for v in equation.invars if value_of(v, constants) is None]
        scaled = name in ("mul", "div") and len(others) == 1
        if not scaled and name not in _UNARY:
            return False
        atom = others[0]
    return False
