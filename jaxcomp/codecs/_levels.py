"""Quantization levels on both sides of zero, whose codes store the sign exactly."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int8, UInt32

from jaxcomp.codecs import noise


@dataclasses.dataclass(frozen=True)
class Levels:
    """Quantization levels for a signed value.

    The lowest codes stand for values that are not positive, the others for positive values.

    Positive levels are spaced as in a floating-point format. A value `t` is mapped to `t / first +
    1`. The mantissa of that float is rounded stochastically to `mantissa` bits. Rounding is
    unbiased from 0 to `top`.

    Attributes:
        negatives: Number of codes for values that are not positive. 1: all of them decode to
            `bottom`. 2: they are rounded stochastically to `bottom` or 0.
        positives: Number of codes for positive values. Their levels run from 0 to `top`.
        first: Value at which the distance between levels doubles for the first time.
        mantissa: The distance doubles after each 2^mantissa levels.
        bottom: The lowest level.

    Example:
        >>> levels = Levels(negatives=1, positives=3, first=0.75, mantissa=0, bottom=-0.8)
        >>> levels.decode(jnp.arange(4))[0].tolist(), levels.top
        ([-0.800000011920929, 0.0, 0.75, 2.25], 2.25)
    """

    negatives: int
    positives: int
    first: float
    mantissa: int
    bottom: float

    @property
    def top(self) -> float:
        """The highest level. Larger values are clipped to it."""
        octave, step = divmod(self.positives - 1, 2**self.mantissa)
        return self.first * (2.0**octave * (1 + step / 2**self.mantissa) - 1)

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
            positive: Whether each value is positive. Decoding returns this mask exactly.
            random: 32 random bits for each value, from `noise.words`.

        Returns:
            int32 codes in [0, negatives + positives).
        """
        shift = 23 - self.mantissa
        floats = lax.bitcast_convert_type(jnp.maximum(t, 0) * (1 / self.first) + 1, jnp.uint32)
        cut = ((floats + (random >> (32 - shift))) >> shift).astype(jnp.int32) - self._base
        codes = self.negatives + jnp.clip(cut, 0, self.positives - 1)
        if self.negatives == 1:
            return jnp.where(positive, codes, 0)
        above = t * (1 / self.bottom) < noise.fraction(random)
        return jnp.where(positive, codes, above.astype(jnp.int32))

    @functools.partial(jax.jit, static_argnums=0)
    def decode(
        self, codes: Int[Array, "*shape"]
    ) -> tuple[Float[Array, "*shape"], Bool[Array, "*shape"]]:
        """Decodes codes.

        Args:
            codes: int32 codes.

        Returns:
            The float32 levels, and the mask of positive values.
        """
        positive = codes >= self.negatives
        up = self._up(codes) * self.first
        down = jnp.where(codes == 0, jnp.float32(self.bottom), 0.0)
        return jnp.where(positive, up, down), positive

    def multiples(self, codes: Int[Array, "*shape"]) -> Int8[Array, "*shape"]:
        """Returns positive levels as multiples of `step`, and 0 for the other values."""
        up = self._up(codes) * 2**self.mantissa
        return jnp.where(codes >= self.negatives, up, 0.0).astype(jnp.int8)

    def _up(self, codes: Array) -> Array:
        """Returns the positive levels in units of `first`."""
        floats = (codes + (self._base - self.negatives)) << (23 - self.mantissa)
        return lax.bitcast_convert_type(floats, jnp.float32) - 1

    @property
    def step(self) -> float:
        """The smallest distance between positive levels; they are multiples of it."""
        return self.first / 2**self.mantissa

    @property
    def _base(self) -> int:
        return 127 << self.mantissa  # exponent bits of the float 1
