"""On which paths through a linear program a code appears, and how often."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Set
from typing import Any

import numpy as np

from jaxcomp.transform._choice.graph import Graph
from jaxcomp.transform._program.primitives import MOVES, SUMS, linear_uses
from jaxcomp.transform._program.program import Program
from jaxcomp.transform._program.types import Atom, Equation, Variable, is_variable

# A code that comes back after a mean of at least so many elements of independent noise and equal
# weight is used again: what it then adds to the expected gradient is its variance divided by that
# number.
AVERAGED = 64
# Leave the elements' weights equal.
_EVEN = (MOVES | SUMS | {"reduce_sum"}) - {"concatenate", "stack"}

Uses = tuple[tuple[Any, int], ...]
Axes = frozenset[int] | None  # None: nothing is known of any axis
Roots = Mapping[Any, Axes]


@dataclasses.dataclass(frozen=True)
class _Path:
    """What the paths up to a tangent hold of one stored value.

    Attributes:
        copies: Codes of it that a path holds since its last mean.
        summed: Elements that were summed since the last of them.
        repeats: How many of the elements since then may have the same noise.
        uneven: Axes of the tangent along which the elements of one code may have other weights.
        mean: Elements of the least mean that a path took after one of them; 0 is none.
        before: Codes of it that a path held before such a mean.
    """

    copies: int = 0
    summed: int = 1
    repeats: int = 1
    uneven: Axes = frozenset()
    mean: int = 0
    before: int = 0

    def join(self, other: "_Path") -> "_Path":
        summed = [p.summed for p in (self, other) if p.copies]
        means = [p.mean for p in (self, other) if p.mean]
        return _Path(
            max(self.copies, other.copies),
            min(summed, default=1),
            max(self.repeats, other.repeats),
            _union(self.uneven, other.uneven),
            min(means, default=0),
            max(self.before, other.before),
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


def assign(linear: Program, tangents: Set[Variable], roots: Callable[[Atom], Roots]) -> Assignment:
    """Numbers the codes so that no path through a linear program holds the same one twice.

    A gradient is a sum over paths of products of coefficients. It is unbiased if each code appears
    once in each product; where a value comes again it has another code, of independent noise.

    Args:
        linear: The program.
        tangents: Its variables that are tangents.
        roots: The coded values that a coefficient is rebuilt from, as in `coded_roots`.

    Returns:
        The numbers.
    """
    paths: dict[Any, dict[Any, _Path]] = {}
    uses: dict[tuple[int, int], Uses] = {}
    means: dict[Any, int] = {}
    used = [
        {p: roots(equation.invars[p]) for p in linear_uses(equation, tangents)}
        for equation in linear.equations
    ]
    last_use = {root: i for i, each in enumerate(used) for found in each.values() for root in found}
    for index, equation in enumerate(linear.equations):
        state: dict[Any, _Path] = {}
        again = {root for found in used[index].values() for root in found}
        for atom in equation.invars:
            for root, path in paths.get(atom, {}).items() if is_variable(atom) else ():
                path = path if root in again else _after(path, atom, equation)
                state[root] = path.join(state.get(root, path))
        for position, roots_of in used[index].items():
            found = []
            coefficient = equation.invars[position]
            for root, uneven in roots_of.items():
                path = state.get(root, _Path())
                found.append((root, path.copies))
                if path.copies < path.before:
                    means[root] = min(path.mean, means.get(root, path.mean))
                repeats = -(-_size(coefficient) // max(1, _size(root)))
                state[root] = _Path(
                    path.copies + 1,
                    1,
                    max(1, repeats, path.repeats),
                    _union(path.uneven, uneven),
                    path.mean,
                    path.before,
                )
            uses[index, position] = tuple(found)
        state = {root: path for root, path in state.items() if last_use[root] > index}
        paths |= dict.fromkeys(equation.outvars, state)
    return Assignment(uses, means)


def _after(path: _Path, tangent: Atom, equation: Equation) -> _Path:
    """Returns the path of a tangent after an equation that may be a part of a mean."""
    if not path.copies:
        return path
    name, scale = equation.primitive.name, _scale(equation)
    if scale is None and name not in _EVEN:
        return dataclasses.replace(path, uneven=None)
    before, after = _size(tangent), _size(equation.outvars[0])
    path = dataclasses.replace(path, uneven=_moved(path.uneven, tangent, equation))
    if name == "reduce_sum":
        return dataclasses.replace(path, summed=path.summed * (before // max(1, after)))
    path = dataclasses.replace(path, repeats=path.repeats * max(1, after // max(1, before)))
    independent = path.summed // path.repeats
    if (
        scale is None
        or independent < AVERAGED
        or path.uneven is None
        or scale * path.summed >= 1.01
    ):
        return path
    return _Path(mean=independent, before=max(path.copies, path.before))


def coded_roots(graph: Graph, is_noisy: Mapping[Variable, bool]) -> dict[Any, Roots]:
    """Returns the codes that each value is rebuilt from.

    Args:
        graph: The forward program.
        is_noisy: The stored values, and whether what comes back of them is not exact.

    Returns:
        By value: the stored values, each with the axes of the value along which their elements may
        have other weights, as after the product with a mask.
    """
    roots: dict[Any, Roots] = {}
    for value in (*graph.program.arguments, *graph.order):
        found: dict[Any, Axes] = {}
        defined = graph.defining_equation(value)
        if value in is_noisy:
            found = {value: frozenset()} if is_noisy[value] else {}
        elif defined is not None:
            for operand in graph.operands(value):
                for root, uneven in roots.get(operand, {}).items():
                    weights = _weighted(uneven, operand, defined[0])
                    found[root] = _union(found.get(root, frozenset()), weights)
        roots[value] = found
    return roots


def _weighted(uneven: Axes, operand: Atom, equation: Equation) -> Axes:
    """Returns the uneven axes of a result that is affine in an operand."""
    name = equation.primitive.name
    if name in ("mul", "div"):
        others: list[Any] = [a for a in equation.invars if a is not operand]
        varying = frozenset(i for a in others for i, n in enumerate(a.aval.shape) if n > 1)
        return _union(uneven, varying)
    return _moved(uneven, operand, equation) if name in _EVEN else None


def _moved(uneven: Axes, operand: Atom, equation: Equation) -> Axes:
    """Returns the uneven axes of an operand, as those of the result."""
    name, params = equation.primitive.name, equation.params
    if not uneven:
        return uneven
    if name == "broadcast_in_dim":
        return frozenset(params["broadcast_dimensions"][axis] for axis in uneven)
    if name == "transpose":
        return frozenset(params["permutation"].index(axis) for axis in uneven)
    if name == "reduce_sum":
        remaining = [axis for axis in range(operand.aval.ndim) if axis not in params["axes"]]
        return frozenset(map(remaining.index, uneven)) if uneven.issubset(remaining) else None
    return None if name in ("expand_dims", "reshape", "squeeze", "unstack") else uneven


def _union(axes: Axes, other: Axes) -> Axes:
    return None if axes is None or other is None else axes | other


def _size(atom: Atom) -> int:
    return math.prod(atom.aval.shape)


def _scale(equation: Equation) -> float | None:
    """Returns the constant that an equation multiplies tangents by."""
    literals = [a for a in equation.invars if not is_variable(a)]
    if len(literals) != 1 or np.ndim(literals[0].val):
        return None
    value = math.fabs(complex(literals[0].val).real)
    if equation.primitive.name == "mul":
        return value
    divides = equation.primitive.name == "div" and literals[0] is equation.invars[1]
    return 1 / value if divides and value else None
