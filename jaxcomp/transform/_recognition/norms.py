"""Looks for what makes a norm of an array less its mean."""

import dataclasses

from jaxcomp.transform._program.types import Atom, Equation, Variable, is_variable
from jaxcomp.transform._recognition.means import Mean, Means
from jaxcomp.transform._recognition.pattern import LAYOUT, Pattern

Power = tuple[Atom, int]
"""A factor, and 1 or the -1 of a divisor."""


@dataclasses.dataclass(frozen=True)
class Centred:
    """Where an array less its mean is, in a program.

    Attributes:
        pattern: The program.
        means: Of arrays of the shape of that array.
        statistics: The mean.
    """

    pattern: Pattern
    means: Means
    statistics: Mean

    def deviation(self, factor: Power) -> tuple[Atom, float] | None:
        """Returns the variance and epsilon of a factor 1 / sqrt(variance + epsilon).

        It is None if it is none.
        """
        atom, exponent = factor
        pattern = self.pattern
        equation = pattern.made(pattern.through(atom, *LAYOUT), "rsqrt", "sqrt", "pow", "div")
        if equation is None:
            return None
        (operand, *rest), name = equation.invars, equation.primitive.name
        if name == "div" and exponent == 1 and pattern.constant(operand) == 1.0:
            return self.deviation((rest[0], -1))
        power = {"rsqrt": -0.5, "sqrt": 0.5}.get(name)
        if name == "pow":
            power = pattern.constant(rest[0])
        if power is None or power * exponent != -0.5:
            return None
        added = pattern.made(pattern.through(operand, *LAYOUT), "add")
        if added is None:
            return None
        first, second = added.invars
        epsilon = pattern.constant(second)
        if epsilon is None:
            first, epsilon = second, pattern.constant(first)
        if epsilon is None or self.means.variance(first) != self.statistics:
            return None
        return first, epsilon

    def factors(self, atom: Atom) -> list[Power]:
        """Returns the factors of a product of values per feature, each with its exponent."""
        equation = self.pattern.made(self.pattern.through(atom, *LAYOUT), "mul", "div")
        if equation is None or not all(map(is_variable, equation.invars)):
            return [(atom, 1)]
        first, second = equation.invars
        if equation.primitive.name == "div":
            return [*self.factors(first), (second, -1)]
        return [*self.factors(first), *self.factors(second)]

    def next(self, value: Variable) -> Equation | None:
        """Returns the one equation that reads a value, but for the squares of a variance."""
        readers = [
            e
            for e in self.pattern.readers.get(value, [])
            if e.primitive.name not in ("square", "integer_pow")
            and not (e.primitive.name == "mul" and e.invars[0] is e.invars[1])
        ]
        return readers[0] if len(readers) == 1 and value not in self.pattern.results else None
