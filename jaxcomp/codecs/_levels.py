"""Levels on both sides of zero, whose codes say the sign exactly."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int8, UInt32

from jaxcomp.codecs import noise


@dataclasses.dataclass(frozen=True)
class Levels:
    """First codes for values that are not positive, then codes for those that are.

    Positive levels grow by powers of two: a value in units of `first`, plus 1, is a float whose
    lower mantissa bits are rounded at random and cut, which is unbiased from 0 to `top`.

    Attributes:
        negatives: Codes of values that are not positive: 1 for `bottom` alone, or 2 for `bottom`
            and 0, between which values are rounded at random.
        positives: Codes of positive values: 0, then up to `top`.
        first: Where the distance between levels doubles for the first time.
        mantissa: 2^mantissa distances are the same before it doubles.
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
        """The highest level; what is above comes back as it."""
        octave, step = divmod(self.positives - 1, 2**self.mantissa)
        return self.first * (2.0**octave * (1 + step / 2**self.mantissa) - 1)

    @functools.partial(jax.jit, static_argnums=0)
    def encode(
        self,
        t: Float[Array, "*shape"],
        positive: Bool[Array, "*shape"],
        random: UInt32[Array, "*shape"],
    ) -> Int[Array, "*shape"]:
        """Codes of float32 values.

        Args:
            t: The values.
            positive: Which side of zero each is on; decoding gives it back exactly.
            random: 32 random bits for each, as `noise.words` draws them.

        Returns:
            int32 codes.
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
        """The float32 values that int32 codes stand for, and which are positive."""
        positive = codes >= self.negatives
        up = self._up(codes) * self.first
        down = jnp.where(codes == 0, jnp.float32(self.bottom), 0.0)
        return jnp.where(positive, up, down), positive

    def multiples(self, codes: Int[Array, "*shape"]) -> Int8[Array, "*shape"]:
        """The positive values that codes stand for, as multiples of `step`; 0 for the others."""
        up = self._up(codes) * 2**self.mantissa
        return jnp.where(codes >= self.negatives, up, 0.0).astype(jnp.int8)

    def _up(self, codes: Array) -> Array:
        """The positive values, in units of `first`."""
        floats = (codes + (self._base - self.negatives)) << (23 - self.mantissa)
        return lax.bitcast_convert_type(floats, jnp.float32) - 1

    @property
    def step(self) -> float:
        """The least distance between positive levels, of which all are multiples."""
        return self.first / 2**self.mantissa

    @property
    def _base(self) -> int:
        return 127 << self.mantissa  # of the float 1
