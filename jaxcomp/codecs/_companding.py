"""Levels whose distances grow: fine for the usual values, coarse for the rare large ones."""

import dataclasses
import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Num


@dataclasses.dataclass(frozen=True)
class Companding:
    """Increasing levels, each at least as far from the next as from the one before.

    The index of a value among the levels is piecewise linear, and concave, since distances grow. So
    it is the least of a few lines, one for each distance. The level of an index is the greatest.

    Attributes:
        unit: What the levels are multiples of.
        multiples: The levels in that unit, from the first on, none negative.

    Example:
        >>> levels = Companding(0.5, (0, 1, 2, 4, 20))
        >>> levels.index(jnp.array([0.25, 0.5, 1.5, 10.0])).tolist(), levels.top
        ([0.5, 1.0, 2.5, 4.0], 10.0)
    """

    unit: int | float
    multiples: tuple[int | float, ...]

    @property
    def top(self) -> float:
        """The highest level."""
        return float(self.unit * self.multiples[-1])

    @functools.cached_property
    def _lines(self) -> list[tuple[int, int | float, int | float]]:
        """Index and multiple at which each distance begins, and the distance."""
        found: list[tuple[int, int | float, int | float]] = []
        for i, (low, high) in enumerate(zip(self.multiples, self.multiples[1:], strict=False)):
            if not found or found[-1][2] != high - low:
                found.append((i, low, high - low))
        return found

    def index(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Returns the positions of values among the levels; below the first they are negative."""
        x = x * (1 / self.unit)
        lines = [x * (1 / gap) + (i - low / gap) for i, low, gap in self._lines]
        return functools.reduce(jnp.minimum, lines)

    def multiple(self, index: Num[Array, "*shape"]) -> Num[Array, "*shape"]:
        """Returns the multiples of the unit at positions among the levels."""
        lines = [index * gap + (low - i * gap) for i, low, gap in self._lines]
        return functools.reduce(jnp.maximum, lines)

    def signed_multiple(self, index: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Returns the multiples at positions among levels on both sides of zero.

        The first level is half a distance from zero, on each side. Position 0.5 is its place above
        zero, -0.5 below.
        """
        (_, _, gap), *others = self._lines
        multiple = index * gap
        for i, _, wider in others:
            beyond = index - jnp.clip(index, -(i + 0.5), i + 0.5)
            multiple, gap = multiple + beyond * (wider - gap), wider
        return multiple
