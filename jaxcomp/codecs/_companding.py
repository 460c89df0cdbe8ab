"""Levels whose distances grow: fine for the usual values, coarse for the rare large ones."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Int32, Num, UInt32

from jaxcomp._core import platforms
from jaxcomp.codecs import noise


@dataclasses.dataclass(frozen=True)
class FloatIndex:
    """A float whose bits hold an index and its fraction.

    Floats of one power of two are equidistant, and those of the next one are twice as far apart. So
    an index whose steps double there is linear in the float, and takes a single line. A GPU adds
    noise to the bits, shifts them, and makes a float of an index by a shift and a sum: it converts
    numbers more slowly.

    Attributes:
        zero: The float of index 0.
        point: Number of bits of the fraction.
    """

    zero: float
    point: int

    @property
    def _bits(self) -> int:
        """The bits of the float of index 0."""
        return int(np.float32(self.zero).view(np.int32))

    def of(self, index: int | float) -> float:
        """Returns the float of an index that is no array."""
        bits = self._bits + round(index * 2**self.point)
        return float(np.int32(bits).view(np.float32))

    def of_codes(self, codes: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Returns the floats of indices."""
        return self._float(codes << self.point)

    def _float(self, fixed: Array) -> Array:
        return lax.bitcast_convert_type(fixed + self._bits, jnp.float32)

    def fixed(self, x: Float[Array, "*shape"]) -> Int32[Array, "*shape"]:
        """Returns the index of a float with its fraction, as an integer, to be `rounded`."""
        return lax.bitcast_convert_type(x, jnp.int32) - self._bits

    def rounded(
        self, fixed: Int32[Array, "*shape"], random: UInt32[Array, "*shape"]
    ) -> Int32[Array, "*shape"]:
        """Rounds indices down or up at random, so that the mean is the index.

        Args:
            fixed: Indices, from `fixed`.
            random: 32 random bits for each index, of which the upper 16 are used.
        """

        def by_bits(fixed: Array, random: Array) -> Array:
            half = 1 << self.point - 17 if self.point > 16 else 0  # of a step of random numbers
            added = lax.bitcast_convert_type(random >> (32 - self.point), jnp.int32)
            return (fixed + added + half) >> self.point

        def by_conversion(fixed: Array, random: Array) -> Array:
            index = self._float(fixed) - self.zero
            return jnp.floor(index + noise.fraction(random)).astype(jnp.int32)

        if self != EVEN:
            return by_bits(fixed, random)
        return platforms.convert_to_round_on_tpu((fixed, random), by_conversion, by_bits)


EVEN = FloatIndex(128.0, 16)  # all indices up to 127 have the same power of two


@dataclasses.dataclass(frozen=True)
class Companding:
    """Increasing levels, each at least as far from the next as from the one before.

    The index of a value among the levels is piecewise linear, and concave, since distances grow. So
    it is the least of a few lines, one for each distance. The level of an index is the greatest.

    Attributes:
        unit: What the levels are multiples of.
        multiples: The levels in that unit, from the first on, none negative.
        first: Index of the first level.
        floats: The floats that stand for indices. With fewer lines they are faster.

    Example:
        >>> levels = Companding(0.5, (0, 1, 2, 4, 20))
        >>> (levels.position(jnp.array([0.25, 0.5, 1.5, 10.0])) - 128).tolist(), levels.top
        ([0.5, 1.0, 2.5, 4.0], 10.0)
    """

    unit: int | float
    multiples: tuple[int | float, ...]
    first: int | float = 0
    floats: FloatIndex = EVEN

    @property
    def top(self) -> float:
        """The highest level."""
        return float(self.unit * self.multiples[-1])

    @property
    def ends(self) -> tuple[float, float]:
        """The positions of the first and the last level."""
        return self.floats.of(self.first), self.floats.of(self.first + len(self.multiples) - 1)

    @functools.cached_property
    def _lines(self) -> list[tuple[float, int | float, float]]:
        """Position and multiple at which each line begins, and its slope in multiples."""
        found: list[tuple[float, int | float, float]] = []
        for i, (low, high) in enumerate(zip(self.multiples, self.multiples[1:], strict=False)):
            start, end = (self.floats.of(self.first + j) for j in (i, i + 1))
            slope = (high - low) / (end - start)
            if not found or found[-1][2] != slope:
                found.append((start, low, slope))
        return found

    @property
    def line(self) -> tuple[float, float]:
        """Slope and intercept of the first line: the position of a small value."""
        start, low, slope = self._lines[0]
        return 1 / (slope * self.unit), start - low / slope

    def position(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Returns the positions of values, as `floats`; lower ones are below the first level."""
        slope, intercept = self.line
        return self.position_of(x * slope + intercept)

    def position_of(self, on_line: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Returns the positions of values whose positions on the first line are given."""
        start, low, slope = self._lines[0]
        lines = [on_line]
        for begin, multiple, steeper in self._lines[1:]:
            ratio = slope / steeper
            there = start + (multiple - low) / slope
            lines.append(on_line * ratio + (begin - there * ratio))
        return functools.reduce(jnp.minimum, lines)

    def multiple(self, codes: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Returns the levels of indices, as multiples of the unit, which are exact."""
        position = self.floats.of_codes(codes)
        lines = [position * slope + (low - start * slope) for start, low, slope in self._lines]
        return functools.reduce(jnp.maximum, lines)

    def multiple_of(self, index: Num[Array, "*shape"]) -> Num[Array, "*shape"]:
        """Does what `multiple` does, for indices in integers or in floats, and in their dtype."""
        lines = []
        for i, (low, high) in enumerate(zip(self.multiples, self.multiples[1:], strict=False)):
            line = high - low, low - (self.first + i) * (high - low)
            if line not in lines:
                lines.append(line)
        return functools.reduce(jnp.maximum, [index * gap + offset for gap, offset in lines])


def with_sign(size: Float[Array, "*shape"], of: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns float32 values that are not negative, with the signs of others.

    Example:
        >>> with_sign(jnp.array([1.0, 2.0]), jnp.array([-3.0, 3.0])).tolist()
        [-1.0, 2.0]
    """
    sign = lax.bitcast_convert_type(of, jnp.uint32) & jnp.uint32(1 << 31)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(size, jnp.uint32) | sign, jnp.float32)
