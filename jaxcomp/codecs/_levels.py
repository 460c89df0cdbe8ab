"""Quantization levels on both sides of zero, whose codes store the sign exactly."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int8, UInt32

from jaxcomp.codecs import noise
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
        negative: The levels of values that are not positive, in ascending order. A single level
            stands for all of them. Of several, the last is 0, each is at least as far from the
            next as that from its own next, and rounding between them is stochastic and unbiased.
        positive: The levels of positive values, from 0 to `top`. The first has the index
            `len(negative)`. Rounding between them is stochastic and unbiased.

    Example:
        >>> levels = Levels((-0.8,), positive=Companding(0.75, (0, 1, 3), 1))
        >>> levels.decode(jnp.arange(4))[0].tolist(), levels.top
        ([-0.800000011920929, 0.0, 0.75, 2.25], 2.25)
    """

    negative: tuple[float, ...]
    positive: Companding

    @property
    def negatives(self) -> int:
        """The number of codes for values that are not positive."""
        return len(self.negative)

    @property
    def bottom(self) -> float:
        """The lowest level. Smaller values are clipped to it."""
        return self.negative[0]

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
    ) -> Int[Array, "*shape"]:
        """Does what `encode` does, elementwise.

        Args:
            position: The positions of the values on the line `positive.line`.
            positive: As in `encode`.
            random: As in `encode`.
        """
        floats, (first, last) = self.positive.floats, self.positive.ends
        above = jnp.clip(self.positive.position_of(position), first, last)
        if self.negatives == 1:
            codes = floats.rounded(floats.fixed(above), random)
            return jnp.where(positive, codes, 0)
        lowest, zero = floats.of(0), floats.of(self.negatives - 1)
        below = jnp.clip(self._below(position), lowest, zero)
        return floats.rounded(floats.fixed(jnp.where(positive, above, below)), random)

    def _below(self, position: Array) -> Array:
        """Returns the places among the negative levels of values on the line of positive ones.

        Distances grow away from zero, so the place is the greatest of a line for each distance.
        """
        slope, intercept = self.positive.line
        places = []
        for i, (low, high) in enumerate(itertools.pairwise(self.negative)):
            start, end = (self.positive.floats.of(j) for j in (i, i + 1))
            ratio = (end - start) / ((high - low) * slope)
            places.append(position * ratio + (end - (high * slope + intercept) * ratio))
        return functools.reduce(jnp.maximum, places)

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
        level = self.decode_positive(codes)
        if dither is not None:
            return level - dither, codes >= self.negatives
        if self.negative[-1] == 0:
            level = jnp.maximum(level, 0)  # of the code below the first of positive values
        for code, negative in enumerate(self.negative):
            if negative != 0:
                level = jnp.where(codes == code, negative, level)
        return level, codes >= self.negatives

    def decode_positive(self, codes: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Decodes the codes of positive values; of the others the result is any finite number."""
        return self.positive.multiple(codes) * self.positive.unit

    @functools.partial(jax.jit, static_argnums=0)
    def dither(self, random: UInt32[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Returns what to subtract from decoded positive values, with the mean zero.

        Args:
            random: The random bits that `encode` took.
        """
        slope = _SLOPE * self.positive.unit
        return noise.from_one(random) * slope - slope * (1.5 - 2.0**-17)

    def multiples(self, codes: Int[Array, "*shape"]) -> Int8[Array, "*shape"]:
        """Returns positive levels as multiples of their unit, and 0 for the other values."""
        # Indices below that of the first level have lines below zero.
        return jnp.maximum(self.positive.multiple_of(codes), 0).astype(jnp.int8)
