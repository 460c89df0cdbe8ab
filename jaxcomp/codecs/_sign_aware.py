"""A code for pre-activations and for ReLU's outputs, in units that their norm knows."""

import dataclasses
import typing

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int8, UInt32

from jaxcomp.codecs import noise, packing
from jaxcomp.codecs._codec import Codec, Encoded, Seed, channel_axes
from jaxcomp.codecs._levels import Levels
from jaxcomp.codecs._rounding import to_bfloat16

BITS = (2, 3, 4)
SPAN = 4.0  # of a normalised value's code, in standard deviations
HIGHEST_THRESHOLD = 2.0  # standard deviations

ScaleSource = typing.Literal["norm", "range"]

# `first` and `mantissa` of the levels: of those whose top real activations hardly pass (with 2 bits
# 2% of their sum does), the ones of least mean square error.
_POSITIVE = {2: (0.75, 0), 3: (1.0, 1), 4: (0.7, 2)}
_NEGATIVE = {2: (1, -0.8), 3: (2, -6.0), 4: (2, -6.0)}  # codes and lowest level
# The same of a range, whose ends are the last levels: of least noise in a trained network.
_OF_RANGE = {2: (1.0, 0), 3: (1.0, 2), 4: (1.0, 3)}
_SLACK = 2.0**-8  # with which rounding to bfloat16 does not go inward


@dataclasses.dataclass(frozen=True)
class SignAware(Codec):
    """Stores what a ReLU returns: zero exactly, positive values on levels that grow with them.

    `ops.norm_act` codes the pre-activation, too: its sign is ReLU's mask, at no extra bit. There
    levels are in units of the norm's own, so that no pass over the array looks for a range, and
    values beyond the last level come back as it; or between the extremes of each channel of each
    sample (of each sample, for arrays of fewer than 3 axes), rounded outward to bfloat16: that is
    less noisy, nothing is beyond, and it costs a pass. Alone, it is always the latter, negative
    values come back as zero, and one less than 1% below the dtype's greatest may come back as Inf.

    Unbiased up to the last level, but that with 2 bits one code stands for all negative
    pre-activations, in a range for their mean: a norm's backward pass is biased. In the norm's
    units the last of 2 bits is 2.25, too low for 2% of what a trained network's activations sum to,
    and values beyond the last of 3 and 4 bits bias a gradient by 1 to 2% of its norm.

    Attributes:
        bits: Bits of a code: 2, 3 or 4.
        signed: Whether codes tell negative values apart, as `ops.norm_act` has it for
            pre-activations; they take codes from the positive ones.
        scale_source: "norm" or "range", what `ops.norm_act` measures by.

    Raises:
        ValueError: If `bits` or `scale_source` is none of these.

    Example:
        >>> codec = SignAware(bits=4)
        >>> x = jnp.array([[[0.0], [0.5], [2.0]]])
        >>> (codec.decode(codec.encode(x)) > 0).ravel().tolist()
        [False, True, True]
    """

    bits: int = 4
    signed: bool = False
    scale_source: ScaleSource = "norm"
    name: typing.ClassVar[str] = "sign_aware"
    kinds = ("norm_act",)

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in BITS:
            raise ValueError(f"bits={self.bits!r}: expected one of {BITS}")
        if self.scale_source not in typing.get_args(ScaleSource):
            expected = typing.get_args(ScaleSource)
            raise ValueError(f"scale_source={self.scale_source!r}: expected one of {expected}")

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        """Whether a norm's backward pass is unbiased: with 3 or 4 bits of a range."""
        return self.bits > 2 and self.scale_source == "range"

    @property
    def fuses_decode_on_tpu(self) -> bool:  # type: ignore[override]
        """With 4 bits: each code is an element of its own, as its value is."""
        return self.bits == 4

    @property
    def levels(self) -> Levels:
        """What the codes stand for, in units."""
        if self.scale_source == "range":
            (first, mantissa), negative = _OF_RANGE[self.bits], (_NEGATIVE[self.bits][0], -1.0)
        else:
            (first, mantissa), negative = _POSITIVE[self.bits], _NEGATIVE[self.bits]
        negatives, bottom = negative if self.signed else (1, 0.0)
        return Levels(negatives, 2**self.bits - negatives, first, mantissa, bottom)

    def encode_scaled(self, x: Array, channel_scale: Array, random: Array) -> Encoded:
        """Encodes `x` in units that are known.

        Args:
            x: Array without negative values.
            channel_scale: Floats, broadcastable to `x`; the size of typical values.
            random: 32 random bits for each value, as `noise.words` draws them.
        """
        t = x.astype(jnp.float32) / jnp.where(channel_scale == 0, 1, channel_scale).astype(
            jnp.float32
        )
        codes = self.levels.encode(t, x > 0, random)
        arrays = *packing.pack(codes, self.bits), channel_scale, jnp.zeros((1,) * x.ndim)
        return Encoded(arrays, x.shape, x.dtype)

    def encode_activation(self, x: Array, channel_scale: Array, random: Array) -> Encoded:
        """As `encode_scaled`, but "range" takes each channel's own scale; NaN stays NaN."""
        if self.scale_source == "range":
            channel_scale = self._greatest(x) + (0 * channel_scale).astype(jnp.bfloat16)
        return self.encode_scaled(x, channel_scale, random)

    def _greatest(self, x: Array) -> Array:
        """The unit in which the greatest value of each channel of each sample is the top level."""
        greatest = jnp.max(jnp.abs(x), channel_axes(x.ndim), keepdims=True, initial=0)
        return _outward(greatest.astype(jnp.float32) / self.levels.top)

    def _encode(self, x: Array, seed: Seed) -> tuple[Array, ...]:
        if self.signed:
            raise ValueError("signed=True: expected False, but for what `ops.norm_act` makes of it")
        return self.encode_scaled(x, self._greatest(x), noise.words(x, seed)).arrays

    def _decode(
        self, arrays: tuple[typing.Any, ...], shape: tuple[int, ...], dtype: DTypeLike
    ) -> Array:
        *coded, factor, offset = arrays
        if self.signed:
            t, positive = self.decode_preactivation(Preactivation(*coded), shape)
        else:
            t, positive = self.levels.decode(packing.unpack(tuple(coded), shape, self.bits))
        # A channel with a NaN has NaN for its unit; its zeros show it, too.
        return jnp.where(positive, t * factor + offset, 0 * (factor + offset)).astype(dtype)

    def positive(self, code: Encoded) -> Bool[Array, "..."]:
        """Which of the values that `encode_activation` stored are positive."""
        return self.levels.decode(packing.unpack(code.arrays[:-2], code.shape, self.bits))[1]

    def multiples(self, code: Encoded) -> tuple[Int8[Array, "..."], Float[Array, "..."]]:
        """What `encode_activation` stored in known units: integers, and what they are multiples of.

        Their product is what `decode` returns. One number for each channel, if so many units were
        given.
        """
        *packed, channel_scale, _ = code.arrays
        codes = packing.unpack(tuple(packed), code.shape, self.bits)
        return self.levels.multiples(codes), self.levels.step * channel_scale

    def encode_preactivation(
        self,
        h: Float[Array, "*shape"],
        threshold: Float[Array, "..."],
        positive: Bool[Array, "*shape"],
        random: UInt32[Array, "*shape"],
    ) -> "Preactivation":
        """Encodes values of mean 0 and variance 1 in each channel, with their ReLU's mask.

        Args:
            h: The values, in float32.
            threshold: Above which ReLU passes them, of each channel; may be infinite.
            positive: Which it passes; decoding gives it back exactly.
            random: As in `encode_scaled`.
        """
        ends: tuple[Array, ...] = ()
        if self.scale_source == "norm":
            threshold = self._within(threshold)
            t = h - threshold
        else:
            low, high = ends = _extremes(h)
            if self.levels.negatives == 1:
                ends = _mean_unless_all(h, positive, low), high
            start, up, down = self._steps(ends, threshold)
            step = jnp.where(positive, up, down)
            t = (h - start) / jnp.where(step == 0, 1, step)
        packed = packing.pack(self.levels.encode(t, positive, random), self.bits)
        return Preactivation(packed, ends, threshold)

    def decode_preactivation(
        self, code: "Preactivation", shape: tuple[int, ...]
    ) -> tuple[Float[Array, "*shape"], Bool[Array, "*shape"]]:
        """The float32 values that `encode_preactivation` stored, and which ReLU passes."""
        t, positive = self.levels.decode(packing.unpack(code.packed, shape, self.bits))
        if self.scale_source == "norm":
            return t + code.threshold, positive
        start, up, down = self._steps(code.ends, code.threshold)
        return start + t * jnp.where(positive, up, down), positive

    def clips(
        self, h: Float[Array, "*shape"], threshold: Float[Array, "..."]
    ) -> Bool[Array, "*shape"]:
        """Which values `encode_preactivation` clips to the last level, in the norm's units."""
        t = h - self._within(threshold)
        return (t < self.levels.bottom) | (t > self.levels.top)

    def _within(self, threshold: Array) -> Array:
        """A threshold no farther out than that levels that start there reach the usual values."""
        return jnp.clip(threshold, -self.levels.top / 2, HIGHEST_THRESHOLD)

    def _steps(self, ends: tuple[Array, ...], threshold: Array) -> tuple[Array, Array, Array]:
        """Where the levels of a range start, and their units above and below it."""
        low, high = (end.astype(jnp.float32) for end in ends)
        start = jnp.clip(threshold, low, high)
        return start, (high - start) / self.levels.top, start - low

    def encode_normalized(
        self, h: Float[Array, "*shape"], random: UInt32[Array, "*shape"]
    ) -> "Normalized":
        """Encodes values of mean 0 and variance 1 in each channel on equidistant levels.

        In the norm's units they are unbiased from -SPAN to SPAN.

        Args:
            h: The values, in float32.
            random: As in `encode_scaled`.
        """
        ends: tuple[Array, ...] = () if self.scale_source == "norm" else _extremes(h)
        low, step = self._equidistant(ends)
        level = jnp.clip((h - low) / jnp.where(step == 0, 1, step), 0, 2**self.bits - 1)
        codes = jnp.floor(level + noise.fraction(random)).astype(jnp.int32)
        return Normalized(packing.pack(codes, self.bits), ends)

    def decode_normalized(
        self, code: "Normalized", shape: tuple[int, ...]
    ) -> Float[Array, "*shape"]:
        """The float32 values that `encode_normalized` stored."""
        low, step = self._equidistant(code.ends)
        return packing.unpack(code.packed, shape, self.bits).astype(jnp.float32) * step + low

    def _equidistant(self, ends: tuple[Array, ...]) -> tuple[Array, Array]:
        """The lowest of the levels of `encode_normalized`, and their distance."""
        low, high = (jnp.asarray(end, jnp.float32) for end in ends or (-SPAN, SPAN))
        return low, (high - low) / (2**self.bits - 1)


class Preactivation(typing.NamedTuple):
    """What `SignAware.encode_preactivation` stores."""

    packed: tuple[Array, ...]
    ends: tuple[Array, ...]
    threshold: Array


class Normalized(typing.NamedTuple):
    """What `SignAware.encode_normalized` stores."""

    packed: tuple[Array, ...]
    ends: tuple[Array, ...]


def _extremes(h: Array) -> tuple[Array, Array]:
    """The least and the greatest value of each channel of each sample, rounded outward."""
    axes = channel_axes(h.ndim)
    low = jnp.min(h, axes, keepdims=True, initial=jnp.inf)
    high = jnp.max(h, axes, keepdims=True, initial=-jnp.inf)
    return -_outward(-low), _outward(high)


def _mean_unless_all(h: Array, positive: Array, low: Array) -> Array:
    """Of each channel of each sample, the mean of what is not positive; `low` if all is."""
    axes = channel_axes(h.ndim)
    count = (~positive).sum(axes, keepdims=True)
    mean = jnp.where(positive, 0, h).sum(axes, keepdims=True) / jnp.maximum(count, 1)
    return jnp.where(count == 0, low, to_bfloat16(mean))


def _outward(high: Array) -> Array:
    return to_bfloat16(high + _SLACK * jnp.abs(high))
