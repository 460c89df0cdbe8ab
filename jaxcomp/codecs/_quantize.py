"""Uniform quantization to a few random-rounded bits."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxcomp.codecs import noise, packing
from jaxcomp.codecs._codec import Codec, Encoded, Seed, channel_axes

Grouping = typing.Literal["channel", "sample", "row"]
Rounding = typing.Literal["stochastic", "nearest"]


@dataclasses.dataclass(frozen=True)
class Quantize(Codec):
    """Stores each value as one of 2^bits equidistant levels between its group's extremes.

    The extremes are stored as they are, in the array's dtype, so a group's least and greatest value
    and a constant group come back exactly (a range below 2^-114 comes back as its least value; the
    sign of a zero may change; where the device flushes subnormal numbers to zero, so does this).
    With stochastic rounding the decoded value is unbiased to 2^-17 of a step (2^-14 with 8 bits,
    where the level itself is rounded) and at most one step away; with nearest rounding it is biased
    and at most half a step away; a step is (max - min) / (2^bits - 1) of the group. This is before
    the decoded value is rounded to the array's dtype, which adds half a unit in its last place. A
    group with a NaN or Inf comes back as NaN, other groups are not touched. Groups never cross
    samples (axis 0), except that an array of one axis is one group.

    After ActNN (Chen et al., ICML 2021, arXiv:2104.14129, section 3.2), with the groups along the
    array's own axes instead of 256 consecutive values, and exact extremes.

    Attributes:
        bits: Bits of a code: 1, 2, 3, 4 or 8.
        group: Which values share a range: "channel", those of one sample and one index of the last
            axis (one sample, for arrays of fewer than 3 axes); "sample", those of one sample;
            "row", those along the last axis.
        rounding: "stochastic" or "nearest".

    Raises:
        ValueError: If an attribute is none of these.

    Example:
        >>> codec = Quantize(bits=2)
        >>> codec.nbytes((8, 16, 16, 32), jnp.bfloat16)  # codes + two extremes a channel
        17408
        >>> x = jnp.linspace(0.0, 3.0, 4)[None]
        >>> codec.decode(codec.encode(x)).tolist()
        [[0.0, 1.0, 2.0, 3.0]]
    """

    bits: int = 2
    group: Grouping = "channel"
    rounding: Rounding = "stochastic"
    name: typing.ClassVar[str] = "quantize"

    def __post_init__(self) -> None:
        packing.check_bits(self.bits)
        if self.group not in typing.get_args(Grouping):
            raise ValueError(f"group={self.group!r}: expected one of {typing.get_args(Grouping)}")
        if self.rounding not in typing.get_args(Rounding):
            raise ValueError(
                f"rounding={self.rounding!r}: expected one of {typing.get_args(Rounding)}"
            )

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        """Whether decoding is right on average: with stochastic rounding."""
        return self.rounding == "stochastic"

    def _axes(self, rank: int) -> tuple[int, ...]:
        """The axes along which values share a range."""
        if self.group == "row":
            return tuple(range(rank))[-1:]
        if self.group == "channel":
            return channel_axes(rank)
        return tuple(range(1 if rank > 1 else 0, rank))

    def extremes(self, x: Array) -> tuple[Array, Array]:
        """Least and greatest value of each group, NaN for both where one is not finite."""
        axes = self._axes(x.ndim)
        low = jnp.min(x, axes, keepdims=True, initial=jnp.inf)
        high = jnp.max(x, axes, keepdims=True, initial=-jnp.inf)
        finite = jnp.isfinite(low) & jnp.isfinite(high)
        return jnp.where(finite, low, jnp.nan), jnp.where(finite, high, jnp.nan)

    def encode_between(self, x: Array, low: Array, high: Array, seed: Seed) -> tuple[Array, ...]:
        """The arrays that are stored for `x`, whose `extremes` these are."""
        # A 16th, so that the largest range does not overflow nor its reciprocal underflow.
        value, least, most = (a.astype(jnp.float32) / 16 for a in (x, low, high))
        span = most - least
        top = 2**self.bits - 1
        spread = span > top * jnp.finfo(jnp.float32).tiny
        steps = jnp.where(spread, top / jnp.where(spread, span, 1.0), 0.0)
        offset = noise.uniform(x, seed) if self.rounding == "stochastic" else 0.5
        level = (value - least) * steps
        lower = jnp.floor(level)
        codes = lower + (level - lower + offset >= 1)  # a sum of its own: noise keeps its bits
        codes = jnp.clip(codes, 0, top).astype(jnp.int32)
        return *packing.pack(codes, self.bits), low, high

    def encode_within(self, x: Array, low: float, high: float, seed: Seed) -> Encoded:
        """Encodes values that are known to lie between two numbers: no pass looks for their range.

        A NaN comes back as one of these numbers, unlike from `encode`.
        """
        with jax.named_scope(self.stored_name()):
            least, most = (jnp.full((1,) * x.ndim, end, x.dtype) for end in (low, high))
            return Encoded(self.encode_between(x, least, most, seed), x.shape, x.dtype)

    def _encode(self, x: Array, seed: Seed) -> tuple[Array, ...]:
        return self.encode_between(x, *self.extremes(x), seed)

    def _decode(self, arrays: tuple[Array, ...], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        *packed, low, high = arrays
        codes = packing.unpack(tuple(packed), shape, self.bits)
        top = 2**self.bits - 1
        weight = codes.astype(jnp.float32) * (1.0 / top)
        low, high = low.astype(jnp.float32), high.astype(jnp.float32)
        # Halves, whose difference does not overflow. The extremes themselves are selected: XLA may
        # reorder the products.
        between = 2 * (low / 2 + (high / 2 - low / 2) * weight)
        ends = jnp.where(codes == 0, low, high)
        return jnp.where((codes == 0) | (codes == top), ends, between).astype(dtype)
