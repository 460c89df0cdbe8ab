"""Which part of the axes of one array each axis of another array made from it is.

A reshape splits an axis, as a group norm splits that of the channels into groups and the channels
of a group. So each axis of an array is a list of factors, the first of which varies slowest.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

from jaxcomp.transform._program.program import avals
from jaxcomp.transform._program.types import Equation


@dataclasses.dataclass(eq=False)
class Factor:
    """A part of an axis.

    Attributes:
        size: Its length.
        is_constant: Whether values are equal along it, as after a broadcast.
        parts: The factors that it has been split into, if any.
    """

    size: int
    is_constant: bool = False
    parts: tuple["Factor", ...] = ()

    def split(self, slow: int) -> None:
        """Splits it in two, the first of which has the length `slow`."""
        sizes = slow, self.size // slow
        self.parts = tuple(Factor(size, self.is_constant) for size in sizes)


Axis = list[Factor]
Layout = list[Axis]
"""The factors of each axis of an array; an axis of size 1 has none."""


def layout_of(shape: Sequence[int]) -> Layout:
    """Returns a layout of new factors, one for each axis."""
    return [[Factor(size)] if size != 1 else [] for size in shape]


def leaves(factors: Iterable[Factor]) -> list[Factor]:
    """Returns what factors have been split into."""
    return [leaf for f in factors for leaf in (leaves(f.parts) if f.parts else [f])]


def all_leaves(layout: Layout) -> list[Factor]:
    """Returns the factors of all axes of an array in row-major order."""
    return leaves(factor for axis in layout for factor in axis)


def rearranged(layout: Layout, equation: Equation) -> Layout | None:
    """Returns the layout after an equation that rearranges or repeats the values of an array.

    It is None if that is no list of factors.
    """
    name, (after,) = equation.primitive.name, avals(equation.outvars)
    if name in ("convert_element_type", "pvary"):
        return layout
    if name == "broadcast_in_dim":
        result: Layout = [[Factor(n, is_constant=True)] if n != 1 else [] for n in after.shape]
        for axis, factors in zip(equation.params["broadcast_dimensions"], layout, strict=True):
            result[axis] = factors or result[axis]
        return result
    if name in ("reshape", "squeeze", "expand_dims"):
        return _reshaped(layout, after.shape)
    return None


def _reshaped(layout: Layout, shape: tuple[int, ...]) -> Layout | None:
    pending = all_leaves(layout)[::-1]
    result: Layout = []
    for size in shape:
        axis: Axis = []
        while (rest := size // math.prod(f.size for f in axis)) > 1:
            factor = pending.pop()
            if factor.size > rest:
                if factor.size % rest:
                    return None
                factor.split(rest)
                factor, after = factor.parts
                pending.append(after)
            if rest % factor.size:
                return None
            axis.append(factor)
        result.append(axis)
    return result


def varies_with(layout: Layout, other: Layout) -> list[Factor] | None:
    """Returns along which factors of `other` an operand of a layout varies.

    The operand is of the same shape, or of size 1 along some axes. It is None if the operand varies
    along another factor, or along one in another place.
    """
    found: list[Factor] = []
    for mine, theirs in zip(layout, other, strict=True):
        if not mine:
            continue
        if not _refine(mine, theirs):
            return None
        for one, factor in zip(leaves(mine), leaves(theirs), strict=True):
            if one is factor:
                found.append(factor)
            elif not one.is_constant:
                return None
    return found


def _refine(first: Axis, second: Axis) -> bool:
    """Splits the factors of two axes until their sizes agree; False if they never do."""
    while True:
        sizes = [[f.size for f in leaves(axis)] for axis in (first, second)]
        if sizes[0] == sizes[1]:
            return True
        pairs = zip(leaves(first), leaves(second), strict=False)
        pair = next(((a, b) for a, b in pairs if a.size != b.size), None)
        if pair is None:
            return False
        small, large = sorted(pair, key=lambda f: f.size)
        if large.size % small.size:
            return False
        large.split(small.size)
