"""Which axes of the arrays of a program are the same, such as that of an attention's queries."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from jaxcomp.transform._program.primitives import POINTWISE, REDUCTIONS
from jaxcomp.transform._program.program import avals
from jaxcomp.transform._program.types import Equation, is_variable

_ALONG = {"concatenate": "dimension", "split": "axis"}  # the parameter that tells the axis
_ONE_BY_ONE = POINTWISE | {"pvary", "reduce_precision"}

Axis = tuple[Any, int]


class Axes:
    """Classes of axes along which a part of one array takes the same part of the others.

    Args:
        equations: Those of a program.
    """

    def __init__(self, equations: Iterable[Equation]) -> None:
        self._parent: dict[Any, Any] = {}
        for equation in equations:
            self._join_of(equation)

    def find(self, axis: Any) -> Any:
        """Returns the representative of an axis's class."""
        while axis in self._parent:
            axis = self._parent[axis]
        return axis

    def of(self, variable: Any, kind: Any) -> int | None:
        """Returns the axis of a variable in a class, by a representative; None if it has none.

        Raises:
            WholeError: If it has several.
        """
        found = [i for i in range(variable.aval.ndim) if self.find((variable, i)) == kind]
        if len(found) > 1:
            raise WholeError(f"{variable.aval.str_short()} has two axes of one class")
        return found[0] if found else None

    def is_cut(self, kind: Any) -> bool:
        """Returns whether every equation can take a part along the axes of a class."""
        return kind != self.find(_WHOLE)

    def _join(self, one: Any, other: Any) -> None:
        one, other = self.find(one), self.find(other)
        if one != other:
            self._parent[one] = other

    def _join_of(self, equation: Equation) -> None:
        name, params = equation.primitive.name, equation.params
        operands: list[Any] = [v for v in equation.invars if is_variable(v)]
        made: list[Any] = list(equation.outvars)
        out, *more = made
        pairs: list[tuple[Any, Any]] | None = None
        if name in _ONE_BY_ONE and {v.aval.ndim for v in operands} <= {0, out.aval.ndim}:
            pairs = [
                ((v, i), (out, i))
                for v in operands
                for i, size in enumerate(v.aval.shape)
                if size == out.aval.shape[i]  # not an axis of one element, which is repeated
            ]
        elif name == "broadcast_in_dim":
            pairs = [
                ((v, i), (out, axis))
                for v in operands[:1]
                for i, axis in enumerate(params["broadcast_dimensions"])
                if v.aval.shape[i] == out.aval.shape[axis]
            ]
        elif name == "transpose":
            pairs = [((operands[0], i), (out, k)) for k, i in enumerate(params["permutation"])]
        elif name == "squeeze" or name in REDUCTIONS - {"reduce"}:
            gone = params["dimensions" if name == "squeeze" else "axes"]
            kept = [i for i in range(operands[0].aval.ndim) if i not in gone]
            pairs = [((operands[0], i), (out, k)) for k, i in enumerate(kept)]
        elif name == "dot_general":
            pairs = _of_product(equation)
        if pairs is not None and not more:
            for pair in pairs:
                self._join(*pair)
        else:
            self._join_some(equation, name, operands)

    def _join_some(self, equation: Equation, name: str, operands: list[Any]) -> None:
        """Joins axes of a reshape that stay, and those that a step along another axis leaves."""
        made: list[Any] = list(equation.outvars)
        arrays = [v for v in (*operands, *made) if v.aval.ndim]
        stays: set[Axis] = set()
        if name == "reshape" and equation.params["dimensions"] is None:
            (x, *_), (out,) = operands, made
            for axis, size in enumerate(out.aval.shape):
                before = same_axis(x.aval.shape, out.aval.shape, axis)
                if size > 1 and before is not None:
                    self._join((x, before), (out, axis))
                    stays |= {(x, before), (out, axis)}
        else:
            for axis in _unchanged(equation):
                for array in arrays:
                    self._join((arrays[0], axis), (array, axis))
                    stays.add((array, axis))
        for array in arrays:
            for axis, size in enumerate(array.aval.shape):
                if size > 1 and (array, axis) not in stays:
                    self._join((array, axis), _WHOLE)


class WholeError(Exception):
    """A program cannot be evaluated for a part of the arrays along an axis."""


_WHOLE = object()


def same_axis(before: Sequence[int], after: Sequence[int], axis: int) -> int | None:
    """Returns the axis of an array before a reshape that is an axis of it afterwards."""
    outer = math.prod(after[:axis])
    for i, size in enumerate(before):
        if math.prod(before[:i]) == outer and size == after[axis]:
            return i
    return None


def _unchanged(equation: Equation) -> list[int]:
    """Returns the axes that a step along other axes leaves as they are."""
    name, params = equation.primitive.name, equation.params
    if not equation.invars:
        return []
    before, after = (avals(atoms)[0] for atoms in (equation.invars, equation.outvars))
    axes = range(after.ndim)
    if name in _ALONG:
        return [axis for axis in axes if axis != params[_ALONG[name]]]
    if name == "pad":
        return [axis for axis in axes if params["padding_config"][axis] == (0, 0, 0)]
    if name == "slice":
        return [axis for axis in axes if before.shape[axis] == after.shape[axis]]
    return []


def _of_product(equation: Equation) -> list[tuple[Any, Any]]:
    """Returns which axes of a product's operands, and of its result, are the same."""
    contracted, batch = equation.params["dimension_numbers"]
    sides: list[Any] = list(equation.invars)
    (out,) = equation.outvars
    pairs = [
        *(((sides[0], i), (sides[1], k)) for i, k in zip(*contracted, strict=True)),
        *(((sides[0], i), (sides[1], k)) for i, k in zip(*batch, strict=True)),
        *(((sides[0], i), (out, k)) for k, i in enumerate(batch[0])),
    ]
    position = len(batch[0])
    for side, c, b in zip(sides, contracted, batch, strict=True):
        for i in range(side.aval.ndim):
            if i not in (*c, *b):
                pairs.append(((side, i), (out, position)))
                position += 1
    return pairs
