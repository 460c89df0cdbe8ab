"""On which paths through a linear program a code appears, and how often."""

import dataclasses
import math
from collections.abc import Callable, Collection, Set
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxcomp.transform._algebra import linear_uses
from jaxcomp.transform._programs import is_variable

# A code that comes back after a mean of at least so many elements is used again: what it then
# adds to the expected gradient is its variance divided by that number.
AVERAGED = 64

Uses = tuple[tuple[Any, int], ...]


@dataclasses.dataclass(frozen=True)
class _Path:
    """What the paths up to a tangent hold of one stored value.

    Attributes:
        copies: Codes of it that a path holds since its last mean.
        summed: Elements that were summed since the last of them.
        mean: Elements of the least mean that a path took after one of them; 0 is none.
    """

    copies: int = 0
    summed: int = 1
    mean: int = 0

    def join(self, other: "_Path") -> "_Path":
        summed = [p.summed for p in (self, other) if p.copies]
        means = [p.mean for p in (self, other) if p.mean]
        return _Path(max(self.copies, other.copies), min(summed, default=1), min(means, default=0))


@dataclasses.dataclass(frozen=True)
class Assignment:
    """Which of the independent codes of a stored value each use of it reads.

    Attributes:
        uses: By equation of the linear program and position of the operand: pairs of a stored
            value and the number of its code.
        means: Stored values of which one code appears twice on a path, across a mean of so many
            elements.
    """

    uses: dict[tuple[int, int], Uses]
    means: dict[Any, int]


def assign(
    linear: Jaxpr, tangents: Set[Any], roots: Callable[[Any], Collection[Any]]
) -> Assignment:
    """Numbers the codes so that no path through a linear program holds the same one twice.

    A gradient is a sum over paths of products of coefficients. It is unbiased if each code appears
    once in each product; where a value comes again it has another code, of independent noise.

    Args:
        linear: The program.
        tangents: Its variables that are tangents.
        roots: The coded values that a coefficient is rebuilt from.

    Returns:
        The numbers.
    """
    paths: dict[Any, dict[Any, _Path]] = {}
    uses: dict[tuple[int, int], Uses] = {}
    means: dict[Any, int] = {}
    for index, equation in enumerate(linear.eqns):
        state: dict[Any, _Path] = {}
        for atom in equation.invars:
            for root, path in paths.get(atom, {}).items() if is_variable(atom) else ():
                state[root] = path.join(state.get(root, path))
        state = {root: _summed(path, equation, tangents) for root, path in state.items()}
        for position in linear_uses(equation, tangents):
            found = []
            for root in roots(equation.invars[position]):
                path = state.get(root, _Path())
                found.append((root, path.copies))
                if path.mean and not path.copies:
                    means[root] = min(path.mean, means.get(root, path.mean))
                state[root] = _Path(path.copies + 1, 1, path.mean)
            uses[index, position] = tuple(found)
        paths |= dict.fromkeys(equation.outvars, state)
    return Assignment(uses, means)


def _summed(path: _Path, equation: JaxprEqn, tangents: Set[Any]) -> _Path:
    """The path after an equation that may be a part of a mean."""
    if equation.primitive.name == "reduce_sum" and path.copies:
        atoms: list[Any] = [*equation.invars, *equation.outvars]
        sizes = [math.prod(atom.aval.shape) for atom in atoms]
        count = sizes[0] // max(1, sizes[-1])
        return dataclasses.replace(path, summed=path.summed * count)
    scale = _scale(equation)
    if path.summed >= AVERAGED and scale is not None and scale * path.summed < 1.01:
        return _Path(0, 1, path.summed)
    return path


def _scale(equation: JaxprEqn) -> float | None:
    """The constant that an equation multiplies tangents by."""
    literals = [a for a in equation.invars if isinstance(a, Literal)]
    if len(literals) != 1 or np.ndim(literals[0].val):
        return None
    value = math.fabs(complex(literals[0].val).real)
    if equation.primitive.name == "mul":
        return value
    divides = equation.primitive.name == "div" and literals[0] is equation.invars[1]
    return 1 / value if divides and value else None
