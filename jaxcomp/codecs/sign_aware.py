"""A code for pre-activations and for ReLU's outputs, in units that their norm knows."""

import dataclasses
import typing

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt32

from jaxcomp.codecs import noise, packing
from jaxcomp.codecs.codec import Codec, Encoded, Seed, channel_axes
from jaxcomp.codecs.levels import Levels

BITS = (2, 3, 4)
SPAN = 4.0  # a signed code's range, in standard deviations

# `first` and `mantissa` of the levels: of those whose top real activations hardly pass (with 2 bits
# 2% of their sum does), the ones of least mean square error.
_POSITIVE = {2: (0.75, 0), 3: (1.0, 1), 4: (0.7, 2)}
_NEGATIVE = {2: (1, -0.8), 3: (2, -6.0), 4: (2, -6.0)}  # codes and lowest level


@dataclasses.dataclass(frozen=True)
class SignAware(Codec):
    """Stores what a ReLU returns: zero exactly, positive values on levels that grow with them.

    Levels are in units of each channel. `ops.norm_act` gives the norm's own, so that no pass over
    the array is needed, and codes the pre-activation too: its sign is ReLU's mask, at no extra bit.
    Alone, the unit is such that the greatest value of a channel of a sample (of a sample, for
    arrays of fewer than 3 axes) is the top level, and negative values come back as zero.

    Unbiased from 0 to `levels.top` units; what is above comes back as that. With 2 bits the top is
    2.25, and one code stands for all negative pre-activations: a norm's backward pass is biased.

    Attributes:
        bits: Bits of a code: 2, 3 or 4.
        signed: Whether codes tell negative values apart, as `ops.norm_act` has it for
            pre-activations; they take codes from the positive ones.

    Raises:
        ValueError: If `bits` is none of these.

    Example:
        >>> codec = SignAware(bits=4)
        >>> x = jnp.array([[[0.0], [0.5], [2.0]]])
        >>> (codec.decode(codec.encode(x)) > 0).ravel().tolist()
        [False, True, True]
    """

    bits: int = 4
    signed: bool = False
    name: typing.ClassVar[str] = "sign_aware"
    kinds = ("norm_act",)

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in BITS:
            raise ValueError(f"bits={self.bits!r}: expected one of {BITS}")

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        """Whether a norm's backward pass is unbiased: with 3 or 4 bits."""
        return self.bits > 2

    @property
    def levels(self) -> Levels:
        """What the codes stand for, in units."""
        negatives, bottom = _NEGATIVE[self.bits] if self.signed else (1, 0.0)
        first, mantissa = _POSITIVE[self.bits]
        return Levels(negatives, 2**self.bits - negatives, first, mantissa, bottom)

    def encode_in_units(self, x: Array, unit: Array, random: Array) -> Encoded:
        """Encodes `x` in units that are known.

        Args:
            x: Array without negative values.
            unit: Float32, broadcastable to `x`; the size of typical values.
            random: 32 random bits for each value, as `noise.words` draws them.
        """
        t = x.astype(jnp.float32) / jnp.where(unit == 0, 1, unit)
        codes = self.levels.encode(t, x > 0, random)
        arrays = *packing.pack(codes, self.bits), unit, jnp.zeros_like(unit)
        return Encoded(arrays, x.shape, x.dtype)

    def _encode(self, x: Array, seed: Seed) -> tuple[Array, ...]:
        greatest = jnp.max(jnp.abs(x), channel_axes(x.ndim), keepdims=True, initial=0)
        unit = greatest.astype(jnp.float32)
        unit = unit / self.levels.top
        return self.encode_in_units(x, unit, noise.words(x, seed)).arrays

    def _decode(self, arrays: tuple[Array, ...], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        *packed, factor, offset = arrays
        t, positive = self.levels.decode(packing.unpack(tuple(packed), shape, self.bits))
        # A channel with a NaN has NaN for its unit; its zeros show it, too.
        return jnp.where(positive, t * factor + offset, 0 * (factor + offset)).astype(dtype)


def encode_normalized(
    h: Float[Array, "*shape"], bits: int, random: UInt32[Array, "*shape"]
) -> Int[Array, "*shape"]:
    """Uniform codes of values of mean 0 and variance 1; unbiased from -SPAN to SPAN."""
    steps = 2**bits - 1
    level = jnp.clip((h + SPAN) * (steps / (2 * SPAN)), 0, steps)
    return jnp.floor(level + noise.fraction(random)).astype(jnp.int32)


def decode_normalized(codes: Int[Array, "*shape"], bits: int) -> Float[Array, "*shape"]:
    """The float32 values that `encode_normalized` stored."""
    return codes.astype(jnp.float32) * (2 * SPAN / (2**bits - 1)) - SPAN
