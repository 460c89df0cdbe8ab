"""Finds values in which a large constant stands beside other numbers, as behind a mask."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxcomp._core.made_cast import NAME as MADE_CAST
from jaxcomp.transform._program.primitives import MOVES, POINTWISE
from jaxcomp.transform._program.program import Program
from jaxcomp.transform._program.types import Equation, Variable, is_variable

_LARGE = 32.0  # times what numbers in a network usually are
_LOCAL = POINTWISE | MOVES


@dataclasses.dataclass(frozen=True)
class Outlier:
    """A constant that some elements of a value hold.

    Attributes:
        constant: It, as it was written.
        is_low: Whether it may be far below the other elements.
        is_high: Whether it may be far above them.
    """

    constant: float
    is_low: bool
    is_high: bool

    def times(self, factor: float | None) -> "Outlier":
        """Returns what becomes of it by a factor; None is one of any sign."""
        if factor is None:
            return Outlier(self.constant, True, True)
        return self if factor > 0 else Outlier(self.constant, self.is_high, self.is_low)


class Outliers(NamedTuple):
    """What large constants do to the values of a program.

    Attributes:
        held: The values that hold one, and it.
        behind: Functions of such values that hold none, as `exp`, and their sign; 0 if they have
            both. They may be zero where the constant is: a gradient may be their product with it.
    """

    held: dict[Variable, Outlier]
    behind: dict[Variable, int]


def outliers(program: Program, given: Mapping[int, Outlier]) -> Outliers:
    """Finds the values that hold a large constant beside other numbers.

    The levels of a code are between the extremes of a value. Next to such a constant they are too
    far apart for the other numbers. The constant comes from a selection, from padding, or from a
    product with a mask. Sums, products and rearrangements keep it; `exp` and the like do not.

    Args:
        program: The program, flat.
        given: What some of its arguments hold, by their positions.
    """
    of_arguments = {program.arguments[i]: outlier for i, outlier in given.items()}
    search = _Search(of_arguments)
    for equation in program.equations:
        search.take(equation)
    return Outliers(search.held, search.behind)


class _Search:
    """What is known of the results of the equations so far."""

    def __init__(self, given: Mapping[Variable, Outlier]) -> None:
        self.held: dict[Variable, Outlier] = {**given}
        self.behind: dict[Variable, int] = {}
        self._constants: dict[Variable, float] = {}  # are one number everywhere
        self._masks: set[Variable] = set()  # are made of truth values, integers and constants

    def take(self, equation: Equation) -> None:
        """Takes note of what an equation makes."""
        name, operands = equation.primitive.name, list(equation.invars)
        floats = [v for v in equation.outvars if is_variable(v) and _is_float(v)]
        is_local = name in _LOCAL
        if is_local and all(map(self._is_mask, operands)):
            self._masks.update(floats)
        number = self._constant(operands[0]) if name in MOVES else None
        if number is not None:
            self._constants |= dict.fromkeys(floats, number)
        elif outlier := self._outlier(equation, operands):
            self.held |= dict.fromkeys(floats, outlier)
        elif is_local and any(v in self.held or v in self.behind for v in map(_key, operands)):
            self.behind |= dict.fromkeys(floats, self._sign(equation, operands))

    def _sign(self, equation: Equation, operands: list[Any]) -> int:
        """Returns the sign of a function of values that hold an outlier; 0 if it may have both."""

        def sign(atom: Any) -> int:
            number = self._constant(atom)
            return self.behind.get(_key(atom), 0) if number is None else int(np.sign(number))

        match equation.primitive.name:
            case "abs" | "erfc" | "exp" | "exp2" | "logistic" | "sqrt" | "square":
                return 1
            case "neg":
                return -sign(operands[0])
            case "max" if any(n >= 0.0 for n in map(self._constant, operands) if n is not None):
                return 1
            case "mul" | "div":
                return sign(operands[0]) * sign(operands[1])
            case name if name in MOVES:
                return sign(operands[0])
        return 0

    def _outlier(self, equation: Equation, operands: list[Any]) -> Outlier | None:
        """Returns what is an outlier of an equation's result, if anything is."""
        held = list(map(self._of, operands))
        match equation.primitive.name:
            case "select_n":
                return self._of_parts(operands[1:])
            case "concatenate" | "dynamic_update_slice" | "pad" | "scatter" | "stack":
                return self._of_parts(operands)
            case "mul":
                return self._product(*operands) or self._product(*reversed(operands))
            case "div":
                divisor = self._constant(operands[1])
                return self._scaled(operands[0], 1 / divisor if divisor else None)
            case "sub":
                return _either([held[0], held[1] and held[1].times(-1.0)])
            case "neg":
                return held[0] and held[0].times(-1.0)
            case "max" if None in held:
                return _either([h and dataclasses.replace(h, is_low=False) for h in held])
            case "min" if None in held:
                return _either([h and dataclasses.replace(h, is_high=False) for h in held])
            case "abs" | "sqrt" | "square":
                return held[0] and Outlier(held[0].constant, False, True)
            case "integer_pow" if equation.params["y"] > 0:
                return held[0] and held[0].times(None)
            case "dynamic_slice" | "gather":
                return held[0]
            case "add" | "add_any" | "max" | "min" | "scatter-add":
                return _either(held)
            case name if name in MOVES or name == MADE_CAST:
                return _either(held)
        return None

    def _of_parts(self, parts: Sequence[Any]) -> Outlier | None:
        """Returns the outlier of a value whose elements are those of some others."""
        numbers = [self._constant(atom) for atom in parts]
        if None not in numbers and len({*numbers}) == 1:
            return None
        large = [Outlier(n, n < 0, n > 0) for n in numbers if n is not None and abs(n) >= _LARGE]
        return _either([*map(self._of, parts), *large])

    def _product(self, value: Any, factor: Any) -> Outlier | None:
        return None if _key(factor) in self.behind else self._scaled(value, self._constant(factor))

    def _scaled(self, value: Any, factor: float | None) -> Outlier | None:
        """Returns the outlier of a value times a factor, which is None if it is no constant."""
        if outlier := self._of(value):
            return outlier.times(factor)
        is_large = factor is not None and abs(factor) >= _LARGE
        is_mask = self._is_mask(value) and self._constant(value) is None
        return Outlier(factor, True, True) if factor is not None and is_large and is_mask else None

    def _of(self, atom: Any) -> Outlier | None:
        """Returns what an atom holds, if it holds a large constant."""
        return self.held.get(_key(atom))

    def _constant(self, atom: Any) -> float | None:
        """Returns the number that an atom is everywhere; None if it is not known to be one."""
        if is_variable(atom):
            return self._constants.get(atom)
        return float(atom.val) if np.ndim(atom.val) == 0 and _is_float(atom) else None

    def _is_mask(self, atom: Any) -> bool:
        if not is_variable(atom) or not _is_float(atom):
            return True
        return atom in self._masks or atom in self._constants


def _either(held: Sequence[Outlier | None]) -> Outlier | None:
    """Returns the largest of some outliers, which is on all the sides that they are on."""
    some = [h for h in held if h is not None and (h.is_low or h.is_high)]
    if not some:
        return None
    largest = max((h.constant for h in some), key=abs)
    return Outlier(largest, any(h.is_low for h in some), any(h.is_high for h in some))


def _key(atom: Any) -> Any:
    """Returns a variable; None of a literal, which has no hash."""
    return atom if is_variable(atom) else None


def _is_float(atom: Any) -> bool:
    return jnp.issubdtype(atom.aval.dtype, jnp.floating)
