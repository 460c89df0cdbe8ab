"""On which paths through a linear program a code appears, and how often."""

import dataclasses
import math
from collections.abc import Callable, Collection, Set
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxcomp.transform._algebra import MOVES, SUMS, linear_uses
from jaxcomp.transform._programs import is_variable

# A code that comes back after a mean of at least so many elements of independent noise and equal
# weight is used again: what it then adds to the expected gradient is its variance divided by that
# number.
AVERAGED = 64
_EVEN = MOVES | SUMS | {"reduce_sum"}  # steps that leave the elements' weights equal

Uses = tuple[tuple[Any, int], ...]


@dataclasses.dataclass(frozen=True)
class _Path:
    """What the paths up to a tangent hold of one stored value.

    Attributes:
        copies: Codes of it that a path holds since its last mean.
        summed: Elements that were summed since the last of them.
        repeats: How many of the elements since then may have the same noise.
        even: Whether the elements since then were multiplied by constants alone.
        mean: Elements of the least mean that a path took after one of them; 0 is none.
    """

    copies: int = 0
    summed: int = 1
    repeats: int = 1
    even: bool = True
    mean: int = 0

    def join(self, other: "_Path") -> "_Path":
        summed = [p.summed for p in (self, other) if p.copies]
        means = [p.mean for p in (self, other) if p.mean]
        return _Path(
            max(self.copies, other.copies),
            min(summed, default=1),
            max(self.repeats, other.repeats),
            self.even and other.even,
            min(means, default=0),
        )


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
        state = {root: _after(path, equation) for root, path in state.items()}
        for position in linear_uses(equation, tangents):
            found = []
            for root in roots(equation.invars[position]):
                path = state.get(root, _Path())
                found.append((root, path.copies))
                if path.mean and not path.copies:
                    means[root] = min(path.mean, means.get(root, path.mean))
                repeats = max(1, -(-_size(equation.invars[position]) // max(1, _size(root))))
                state[root] = _Path(path.copies + 1, 1, repeats, True, path.mean)
            uses[index, position] = tuple(found)
        paths |= dict.fromkeys(equation.outvars, state)
    return Assignment(uses, means)


def _after(path: _Path, equation: JaxprEqn) -> _Path:
    """The path after an equation that may be a part of a mean."""
    if not path.copies:
        return path
    name, scale = equation.primitive.name, _scale(equation)
    if scale is None and name not in _EVEN:
        return dataclasses.replace(path, even=False)
    before, after = _size(equation.invars[0]), _size(equation.outvars[0])
    if name == "reduce_sum":
        return dataclasses.replace(path, summed=path.summed * (before // max(1, after)))
    if name == "broadcast_in_dim":
        return dataclasses.replace(path, repeats=path.repeats * max(1, after // max(1, before)))
    independent = path.summed // path.repeats
    if scale is None or independent < AVERAGED or not path.even or scale * path.summed >= 1.01:
        return path
    return _Path(mean=independent)


def _size(atom: Any) -> int:
    return math.prod(atom.aval.shape)


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
