"""Finds where an array is centred in a program: by a difference, or within a sum."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxcomp.transform._program.types import Atom, Equation, Variable, is_variable
from jaxcomp.transform._recognition.pattern import LAYOUT, Pattern

FEW = 8  # times fewer elements than the array


class Beginning(NamedTuple):
    """What a norm begins by.

    Attributes:
        x: The array.
        mean: Its mean.
        value: The array less its mean, times `factor`, plus `bias`.
        factor: The factor, or None.
        bias: The bias, or None.
    """

    x: Atom
    mean: Atom
    value: Variable
    factor: Atom | None = None
    bias: Atom | None = None


def beginning(pattern: Pattern, equation: Equation) -> Beginning | None:
    """Returns the beginning of a norm that ends with an equation; None if there is none.

    The array is one of the shape of the result. Whether the mean is one, the caller has to find.
    """
    return _difference(equation) or _sum(pattern, equation)


def _difference(equation: Equation) -> Beginning | None:
    """Returns the beginning `x - mean`."""
    if equation.primitive.name != "sub" or not all(map(is_variable, equation.invars)):
        return None
    x, mean = equation.invars
    return Beginning(x, mean, equation.outvars[0])


def _sum(pattern: Pattern, equation: Equation) -> Beginning | None:
    """Returns the beginning `x * factor + (bias - mean * factor)`, as in TensorFlow and Keras."""
    if equation.primitive.name != "add":
        return None
    value: Any = equation.outvars[0]
    for scaled, shift in _both_orders(equation):
        product = pattern.made(scaled, "mul")
        if product is None or pattern.only_reader(scaled) is not equation:
            continue
        for x, factor in _both_orders(product):
            few = pattern.through(factor, *LAYOUT)
            if x.aval.shape == value.aval.shape and few.aval.size * FEW <= x.aval.size:
                for mean, bias in _shifts(pattern, shift, factor):
                    return Beginning(x, mean, value, factor, bias)
    return None


def _shifts(pattern: Pattern, shift: Atom, factor: Atom) -> Iterator[tuple[Atom, Atom | None]]:
    """Yields each mean and bias of which an atom is `bias - mean * factor`."""

    def negated(atom: Atom) -> Iterator[Atom]:
        """Yields each mean of which an atom is `-mean * factor`."""
        atom = pattern.through(atom, *LAYOUT)
        if negative := pattern.made(atom, "neg"):
            yield from multiplied(negative.invars[0])
        for operand in multiplied(atom):
            if negative := pattern.made(pattern.through(operand, *LAYOUT), "neg"):
                yield negative.invars[0]

    def multiplied(atom: Atom) -> Iterator[Atom]:
        """Yields each operand of which an atom is the product with the factor."""
        product = pattern.made(pattern.through(atom, *LAYOUT), "mul")
        for one, other in () if product is None else _both_orders(product):
            if pattern.through(other, *LAYOUT) is pattern.through(factor, *LAYOUT):
                yield one

    for mean in negated(shift):
        yield mean, None
    equation = pattern.made(pattern.through(shift, *LAYOUT), "add", "sub")
    if equation is None:
        return
    if equation.primitive.name == "sub":
        bias, product = equation.invars
        for mean in multiplied(product):
            yield mean, bias
        return
    for term, bias in _both_orders(equation):
        for mean in negated(term):
            yield mean, bias


def _both_orders(equation: Equation) -> Iterator[tuple[Any, Any]]:
    """Yields the operands of a sum or product in both orders, if they are variables."""
    first, second = equation.invars
    if is_variable(first) and is_variable(second):
        yield first, second
        yield second, first
