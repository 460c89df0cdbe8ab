"""Quantization levels on both sides of zero, whose codes store the sign exactly."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int8, UInt32

from jaxcomp.codecs import noise, packing
from jaxcomp.codecs._companding import Companding

# The multiple of the random number that is subtracted, in units of the levels. The variance of the
# error is least at 1.1 to 1.3 for values of a ResNet-20, between the usual distances of levels.
_SLOPE = 1.2


@dataclasses.dataclass(frozen=True)
class Levels:
    """Quantization levels for a signed value.

    The lowest codes stand for values that are not positive, the others for positive values.

    A positive value is rounded up where its random number is large. What decodes it may know that
    number, and subtract `dither` from the level. That leaves the mean as it is and takes 25 to 45%
    of the error's variance away. Between equidistant levels it is subtractive dither (Roberts 1962,
    "Picture coding using pseudo-random noise"). Here distances grow, so the same multiple of the
    number is subtracted from all levels: otherwise the mean is wrong between two of them.

    Attributes:
        negatives: Number of codes for values that are not positive. 1: all of them decode to
            `bottom`. 2: they are rounded stochastically to `bottom` or 0.
        positive: The levels of positive values, from 0 to `top`. The first has the index
            `negatives`. Rounding between them is stochastic and unbiased.
        bottom: The lowest level.
        beyond: How far below 0 and above `top` values may be where a third bit stands for them;
            only with `negatives` 1 and `bottom` 0.

    Example:
        >>> levels = Levels(negatives=1, positive=Companding(0.75, (0, 1, 3), 1), bottom=-0.8)
        >>> levels.decode(jnp.arange(4))[0].tolist(), levels.top
        ([-0.800000011920929, 0.0, 0.75, 2.25], 2.25)
    """

    negatives: int
    positive: Companding
    bottom: float
    beyond: tuple[float, float] = (0.0, 0.0)

    @property
    def top(self) -> float:
        """The highest level. Larger values are clipped to it."""
        return self.positive.top

    @functools.partial(jax.jit, static_argnums=0)
    def encode(
        self,
        t: Float[Array, "*shape"],
        positive: Bool[Array, "*shape"],
        random: UInt32[Array, "*shape"],
    ) -> Int[Array, "*shape"]:
        """Quantizes values to codes.

        Args:
            t: float32 values.
            positive: Whether each value is positive. Decoding returns this mask exactly, except
                where `t` is NaN.
            random: 32 random bits for each value, from `noise.words` or
                `noise.indexed_words`.

        Returns:
            int32 codes in [0, negatives + number of positive levels).
        """
        slope, intercept = self.positive.line
        return self.encode_line(t * slope + intercept, positive, random)

    def encode_line(
        self,
        position: Float[Array, "*shape"],
        positive: Bool[Array, "*shape"],
        random: UInt32[Array, "*shape"],
        drawn: Bool[Array, "*shape"] | None = None,
    ) -> Int[Array, "*shape"]:
        """Does what `encode` does, elementwise.

        Args:
            position: The positions of the values on the line `positive.line`.
            positive: As in `encode`.
            random: As in `encode`.
            drawn: One of each `packing.NEIGHBOURS`, from `noise.one_of_neighbours`. Such a value
                has a third bit, which is set at random for what is beyond the levels.
        """
        floats, (first, last) = self.positive.floats, self.positive.ends
        above = jnp.clip(self.positive.position_of(position), first, last)
        if self.negatives == 1:
            codes = jnp.where(positive, floats.rounded(floats.fixed(above), random), 0)
            if drawn is None:
                return codes
            return codes | jnp.where(drawn & self._is_set(position, positive, random), 4, 0)
        slope, intercept = self.positive.line
        lowest, zero = floats.of(0), floats.of(1)
        ratio = (lowest - zero) / (self.bottom * slope)
        below = jnp.clip(position * ratio + (zero - intercept * ratio), lowest, zero)
        return floats.rounded(floats.fixed(jnp.where(positive, above, below)), random)

    def _is_set(self, position: Array, positive: Array, random: Array) -> Array:
        """Returns which third bits are set: with a probability by the distance from the levels.

        Values beyond the levels are not rounded, so they may use the random bits here.
        """
        slope, intercept = self.positive.line
        below, above = (1 / (slope * distance) for distance in self.beyond)
        over = (position - (intercept + self.top * slope)) * above
        under = (intercept - position) * below
        return jnp.where(positive, over, under) > noise.fraction(random)

    @functools.partial(jax.jit, static_argnums=0)
    def decode(
        self, codes: Int[Array, "*shape"], dither: Float[Array, "*shape"] | None = None
    ) -> tuple[Float[Array, "*shape"], Bool[Array, "*shape"]]:
        """Decodes codes.

        Args:
            codes: int32 codes.
            dither: What to subtract from positive levels, from `dither`. The other levels are then
                undefined.

        Returns:
            The float32 levels, and the mask of positive values.
        """
        level = self.positive.multiple(codes)
        if dither is not None:
            return level * self.positive.unit - dither, codes >= self.negatives
        if self.negatives == 2 or self.bottom == 0:
            level = jnp.maximum(level, 0)  # of the code below the first of positive values
        level *= self.positive.unit
        if self.bottom != 0:
            level = jnp.where(codes == 0, self.bottom, level)
        return level, codes >= self.negatives

    @functools.partial(jax.jit, static_argnums=0)
    def dither(self, random: UInt32[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Returns what to subtract from decoded positive values, with the mean zero.

        Args:
            random: The random bits that `encode` took.
        """
        slope = _SLOPE * self.positive.unit
        return noise.from_one(random) * slope - slope * (1.5 - 2.0**-17)

    def beyond_levels(
        self, codes: Int[Array, "*shape"], drawn: Bool[Array, "*shape"]
    ) -> Float[Array, "*shape"]:
        """Returns what third bits add to the levels of codes.

        Args:
            codes: Codes from `packing.unpack_with_shared`.
            drawn: As in `encode_line`.
        """
        below, above = (packing.NEIGHBOURS * distance for distance in self.beyond)
        size = jnp.where(codes & 3 == 0, -below, above)
        return jnp.where(drawn & (codes >= 4), size, 0.0)

    def multiples(self, codes: Int[Array, "*shape"]) -> Int8[Array, "*shape"]:
        """Returns positive levels as multiples of their unit, and 0 for the other values."""
        # Indices below that of the first level have lines below zero.
        return jnp.maximum(self.positive.multiple_of(codes), 0).astype(jnp.int8)
