"""Levels whose distances grow: fine for the usual values, coarse for the rare large ones."""

import dataclasses
import functools

import jax.numpy as jnp
from jax import lax
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

    def index(self, x: Float[Array, "*shape"], first: int | float = 0) -> Float[Array, "*shape"]:
        """Returns the positions of values among the levels; lower ones are below the first.

        Args:
            x: Values.
            first: Position of the first level.
        """
        lines = [
            x * (1 / (gap * self.unit)) + (first + i - low / gap) for i, low, gap in self._lines
        ]
        return functools.reduce(jnp.minimum, lines)

    def multiple(self, index: Num[Array, "*shape"], first: int | float = 0) -> Num[Array, "*shape"]:
        """Returns the levels at positions, as multiples of the unit, which are exact.

        Args:
            index: Positions.
            first: Position of the first level.
        """
        lines = [index * gap + (low - (first + i) * gap) for i, low, gap in self._lines]
        return functools.reduce(jnp.maximum, lines)


def with_sign(size: Float[Array, "*shape"], of: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns float32 values that are not negative, with the signs of others.

    Example:
        >>> with_sign(jnp.array([1.0, 2.0]), jnp.array([-3.0, 3.0])).tolist()
        [-1.0, 2.0]
    """
    sign = lax.bitcast_convert_type(of, jnp.uint32) & jnp.uint32(1 << 31)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(size, jnp.uint32) | sign, jnp.float32)
