"""A codec for ReLU outputs and pre-activations whose codes store the sign exactly."""

import dataclasses
import functools
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int8, UInt32

from jaxcomp._core.integers import as_integer
from jaxcomp.codecs import noise, packing
from jaxcomp.codecs._codec import Codec, Encoded, Seed, channel_axes
from jaxcomp.codecs._companding import Companding, FloatIndex, with_sign
from jaxcomp.codecs._levels import Levels
from jaxcomp.codecs._ranges import (
    equidistant,
    extremes,
    mean_unless_all,
    outward,
    reciprocal,
    with_nans,
)

BITS = (2, 3, 4)
# A threshold of a pre-activation is clipped to these, in standard deviations.
THRESHOLDS = -3.0, 2.0

ScaleSource = Literal["norm", "range"]

# Levels with scales from the norm. They have the least mean square error in a network during
# training. With 3 and 4 bits the last level is far away, so values are hardly ever clipped.
_PREACTIVATION = {
    2: Companding(0.75, (0, 1, 3), 1),
    3: Companding(0.6, (0, 1, 2, 3.5, 6.5, 20), 2),
    4: Companding(0.26, (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 22, 62), 3, FloatIndex(0.9375, 20)),
}
_ACTIVATION = {
    2: Companding(0.75, (0, 1, 3), 1),
    3: Companding(0.52, (0, 1, 2, 3, 5, 9, 23), 1),
    4: Companding(
        0.2, (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 22, 28, 80), 1, FloatIndex(1.125, 20)
    ),
}
_DEVIATION = {  # on both sides of the mean
    2: Companding(8 / 3, (0.5, 1.5), 0.5),
    3: Companding(0.96, (0.5, 1.5, 3.5, 12.5), 0.5),
    4: Companding(0.4, (0.5, 1.5, 2.5, 3.5, 5.5, 7.5, 11.5, 40), 0.5, FloatIndex(1.125, 21)),
}
# Levels of the values that the ReLU stops. The norm's backward pass multiplies these by the mean of
# cotangent times value, over a channel. That mean is large where a channel has few values.
_NEGATIVE = {2: (-0.8,), 3: (-6.0, 0.0), 4: (-6.0, -1.75, 0.0)}
_NEGATIVE_OF_RANGE = {2: (-1.0,), 3: (-1.0, 0.0), 4: (-1.0, 0.0)}
# Levels with ranges, where nothing is clipped; least error in a trained network.
_OF_RANGE = {
    2: Companding(1, (0, 1, 3)),
    3: Companding(0.25, (0, 1, 2, 3, 4, 6, 8)),
    4: Companding(0.125, (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20)),
}


@dataclasses.dataclass(frozen=True)
class SignAware(Codec):
    """Quantizes the output of a ReLU: zero is exact, and the distance of positive levels grows.

    `ops.norm_act` also encodes pre-activations by it. The code then tells the mask of the ReLU,
    which needs no bit of its own.

    In `ops.norm_act` the levels are multiples of a per-channel scale. `scale_source` selects it:

    - "norm": the scale follows from the parameters of the batch norm. No pass over the array
      computes ranges. The distance between levels grows, and the last one is far away: at 16 times
      the scale with 4 bits, at 12 with 3. Values beyond it are clipped; `diagnostics.clipped`
      counts them.
    - "range": the levels lie between the extremes of each channel of each sample (of each sample,
      for arrays of fewer than 3 axes), rounded outward to bfloat16. No value is clipped and the
      error is smaller, but computing the range takes one pass over the array.

    Rounding and decoding use the same random number for each value, so the rounding error is partly
    subtracted again (`Levels.dither`). A small positive value may thus decode to a number below 0.
    `ops.norm_act` subtracts it where a convolution reads the code, not in the norm's own backward
    pass.

    `encode` on its own always uses ranges. Negative values then decode to zero, and a value above
    three quarters of the largest number of the dtype may decode to Inf.

    Values up to the last level are unbiased, except that with 2 bits one code stands for all
    negative pre-activations. With ranges it decodes to their mean; a norm's backward pass is then
    biased. With "norm", the last level of 2 bits is 2.25 times the scale; in a trained network,
    clipping loses 2% of the sum of the activations.

    Attributes:
        bits: Bits per element: 2, 3 or 4.
        signed: Whether codes distinguish negative values, which leaves fewer codes for positive
            values. `ops.norm_act` sets it for pre-activations.
        scale_source: "norm" or "range"; what `ops.norm_act` takes the per-channel scale from.

    Raises:
        ValueError: If `bits` or `scale_source` is invalid.

    Example:
        >>> codec = SignAware(bits=4)
        >>> x = jnp.array([[[0.0], [0.5], [2.0]]])
        >>> (codec.decode(codec.encode(x)) > 0).ravel().tolist()
        [False, True, True]
    """

    bits: int = 4
    signed: bool = False
    scale_source: ScaleSource = "norm"
    kernels: bool = False
    name: ClassVar[str] = "sign_aware"
    kinds = ("norm_act",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", as_integer(self.bits))
        if type(self.bits) is not int or self.bits not in BITS:
            raise ValueError(f"bits={self.bits!r}: expected one of {BITS}")
        if self.scale_source not in get_args(ScaleSource):
            expected = get_args(ScaleSource)
            raise ValueError(f"scale_source={self.scale_source!r}: expected one of {expected}")

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        """Whether a norm's backward pass is unbiased: with 3 or 4 bits."""
        return self.bits > 2

    @property
    def fuses_decode_on_tpu(self) -> bool:  # type: ignore[override]
        """True with 4 bits, where each code is an array element of its own."""
        return self.bits == 4

    @property
    def levels(self) -> Levels:
        """The quantization levels, in multiples of the scale."""
        if self.scale_source == "norm":
            if not self.signed:
                return Levels((0.0,), _ACTIVATION[self.bits])
            return Levels(_NEGATIVE[self.bits], _PREACTIVATION[self.bits])
        negative = _NEGATIVE_OF_RANGE[self.bits] if self.signed else (0.0,)
        unit, multiples = _OF_RANGE[self.bits].unit, _OF_RANGE[self.bits].multiples
        positive = Companding(unit, multiples[: 2**self.bits - len(negative)], len(negative))
        return Levels(negative, positive)

    @property
    def span(self) -> float:
        """Largest deviation of a normalised value that has a level, with scales from the norm."""
        return _DEVIATION[self.bits].top

    @property
    def normal_variance(self) -> float:
        """The mean variance of the rounding error of a norm's values, if these are normal.

        It is in units of the variance of the values, with `scale_source="norm"`; with "range" it is
        less. Of pre-activations (`signed`) the mean is over those above 0.
        """
        ups = (_PREACTIVATION if self.signed else _DEVIATION)[self.bits]
        up = ups.unit * np.asarray(ups.multiples)
        levels = up if self.signed else np.concatenate([-up[::-1], up])
        values = np.linspace(0.0, min(8.0, ups.top), 4001)[1:-1]
        after = np.searchsorted(levels, values)
        variance = (values - levels[after - 1]) * (levels[after] - values)
        return float(np.average(variance, weights=np.exp(-(values**2) / 2)))

    @functools.partial(jax.jit, static_argnums=0, inline=True)
    def encode_scaled(self, x: Array, channel_scale: Array, salt: Array) -> Encoded:
        """Encodes values with a known per-channel scale.

        Args:
            x: Floating-point array without negative values.
            channel_scale: Floating-point array that broadcasts to `x`; the typical magnitude of
                values.
            salt: What selects the rounding noise, from `noise.salt`.

        Returns:
            The encoded array; it holds `channel_scale` and `salt`.
        """
        # Division by 16: the reciprocal of the largest scale is not subnormal.
        value, scale = (a.astype(jnp.float32) / 16 for a in (x, channel_scale))
        slope, intercept = self.levels.positive.line
        position = value * (reciprocal(scale) * slope) + intercept
        codes = self.levels.encode_line(position, x > 0, noise.indexed_words(x.shape, salt))
        arrays = *packing.pack(codes, self.bits), salt, channel_scale, jnp.zeros((1,) * x.ndim)
        return Encoded(arrays, x.shape, x.dtype, self)

    @functools.partial(jax.jit, static_argnums=0, inline=True)
    def encode_activation(self, x: Array, channel_scale: Array, salt: Array) -> Encoded:
        """Encodes the output of a ReLU by the scale that `scale_source` selects.

        Args:
            x: Floating-point array without negative values.
            channel_scale: As in `encode_scaled`. With "range" only its NaNs are used: they stay
                NaN.
            salt: As in `encode_scaled`.

        Returns:
            The encoded array.
        """
        if self.scale_source == "range":
            channel_scale = self._greatest(x) + (0 * channel_scale).astype(jnp.bfloat16)
        return self.encode_scaled(x, channel_scale, salt)

    def _greatest(self, x: Array) -> Array:
        """Returns the scale at which the maximum of each channel and sample is the top level."""
        axes = channel_axes(x.ndim)
        greatest = with_nans(jnp.max(jnp.abs(x), axes, keepdims=True, initial=0), x, axes)
        return outward(greatest.astype(jnp.float32) / self.levels.top)

    def _encode(self, x: Array, seed: Seed) -> tuple[Array, ...]:
        if self.signed:
            raise ValueError("signed=True: expected False, but for what `ops.norm_act` makes of it")
        return self.encode_scaled(x, self._greatest(x), noise.salt(seed, x)).arrays

    def _decode(self, arrays: tuple[Any, ...], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        *coded, salt, factor, offset = arrays
        dither = None if salt is None else self.levels.dither(noise.indexed_words(shape, salt))
        if self.signed and self.scale_source == "range":
            t, positive = self.decode_preactivation(Preactivation(*coded), shape, dither)
        else:
            packed = tuple(coded)
            if self.signed:
                packed, _, threshold = Preactivation(*coded)
                offset += threshold * factor
            t, positive = self.levels.decode(packing.unpack(packed, shape, self.bits), dither)
        # A channel with a NaN has a NaN scale; its zeros decode to NaN too.
        return jnp.where(positive, t * factor + offset, 0 * (factor + offset)).astype(dtype)

    @functools.partial(jax.jit, static_argnums=0, inline=True)
    def positive(self, code: Encoded) -> Bool[Array, "..."]:
        """Returns the mask of positive values of an array that `encode_activation` encoded."""
        return self.levels.decode(packing.unpack(code.arrays[:-3], code.shape, self.bits))[1]

    def multiples(self, code: Encoded) -> tuple[Int8[Array, "..."], Float[Array, "..."]]:
        """Decodes an array from `encode_activation` to integers and the factors that scale them.

        Args:
            code: The encoded array.

        Returns:
            int8 integers and a factor for each channel, if each channel has one scale. Their
            product is the result of `decode` without dither.
        """
        *packed, _, channel_scale, _ = code.arrays
        if self.bits == 4:
            multiples = packing.map_codes(self.levels.multiples, *packed)
        else:
            multiples = self.levels.multiples(packing.unpack(tuple(packed), code.shape, self.bits))
        return multiples, self.levels.positive.unit * channel_scale

    @functools.partial(jax.jit, static_argnums=0, inline=True)
    def encode_preactivation(
        self,
        h: Float[Array, "*shape"],
        threshold: Float[Array, "..."],
        positive: Bool[Array, "*shape"],
        salt: UInt32[Array, ""],
        factor: Float[Array, "..."] | None = None,
    ) -> "Preactivation":
        """Encodes normalised values together with the mask of the ReLU that follows.

        Args:
            h: float32 values with mean 0 and variance 1 in each channel.
            threshold: Value of each channel above which the ReLU passes `h`; may be infinite.
                Broadcasts to `h`.
            positive: Mask of the values that the ReLU passes. Decoding returns it exactly.
            salt: As in `encode_scaled`.
            factor: What `h` is multiplied by, for each channel; None is 1.

        Returns:
            The encoded values.
        """
        random = noise.indexed_words(h.shape, salt)
        ends: tuple[Array, ...] = ()
        factor = jnp.ones(()) if factor is None else factor
        if self.scale_source == "norm":
            threshold = self._within(threshold)
            slope, intercept = self.levels.positive.line
            position = h * (factor * slope) + (intercept - threshold * slope)
            codes = self.levels.encode_line(position, positive, random)
        else:
            h *= factor
            low, high = ends = extremes(h)
            if self.levels.negatives == 1:
                ends = mean_unless_all(h, positive, low), high
            start, up, down = self._steps(ends, threshold)
            t = (h - start) * jnp.where(positive, reciprocal(up), reciprocal(down))
            codes = self.levels.encode(t, positive, random)
        packed = packing.pack(codes, self.bits)
        return Preactivation(packed, ends, threshold)

    @functools.partial(jax.jit, static_argnums=(0, 2), inline=True)
    def decode_preactivation(
        self,
        code: "Preactivation",
        shape: tuple[int, ...],
        dither: Float[Array, "*shape"] | None = None,
    ) -> tuple[Float[Array, "*shape"], Bool[Array, "*shape"]]:
        """Decodes what `encode_preactivation` returned.

        Args:
            code: The encoded values.
            shape: Shape of the values.
            dither: As in `Levels.decode`.

        Returns:
            The float32 values, and the mask of those that the ReLU passes.
        """
        codes = packing.unpack(code.packed, shape, self.bits)
        t, positive = self.levels.decode(codes, dither)
        if self.scale_source == "norm":
            return t + code.threshold, positive
        start, up, down = self._steps(code.ends, code.threshold)
        return start + t * jnp.where(positive, up, down), positive

    def clips(
        self, h: Float[Array, "*shape"], threshold: Float[Array, "..."]
    ) -> Bool[Array, "*shape"]:
        """Returns the mask of values that `encode_preactivation` clips, with `scale_source="norm"`.

        Args:
            h: As in `encode_preactivation`.
            threshold: As in `encode_preactivation`.

        Returns:
            Boolean array of the shape of `h`.
        """
        t = h - self._within(threshold)
        return (t < self.levels.bottom) | (t > self.levels.top)

    def _within(self, threshold: Array) -> Array:
        """Clips a threshold, so that levels that start at it still cover the usual values."""
        return jnp.clip(threshold, *THRESHOLDS)

    def _steps(self, ends: tuple[Array, ...], threshold: Array) -> tuple[Array, Array, Array]:
        """Returns the start of the levels of a range, and the scales above and below it."""
        low, high = (end.astype(jnp.float32) for end in ends)
        start = jnp.clip(threshold, low, high)
        return start, (high - start) / self.levels.top, start - low

    @functools.partial(jax.jit, static_argnums=0, inline=True)
    def encode_normalized(
        self,
        h: Float[Array, "*shape"],
        random: UInt32[Array, "*shape"],
        factor: Float[Array, "..."] | None = None,
    ) -> "Normalized":
        """Encodes normalised values.

        With `scale_source="norm"` the levels reach `span` standard deviations to both sides, within
        which decoded values are unbiased. With "range" they are equidistant.

        Args:
            h: float32 values with mean 0 and variance 1 in each channel.
            random: 32 random bits for each value, from `noise.indexed_words`.
            factor: What `h` is multiplied by, for each channel; not negative. None is 1.

        Returns:
            The encoded values.
        """
        ends: tuple[Array, ...] = ()
        factor = jnp.ones(()) if factor is None else factor
        if self.scale_source == "norm":
            codes = self._codes_of_deviations(h, random, factor)
        else:
            h *= factor
            low, step = equidistant(ends := extremes(h), self.bits)
            index = jnp.clip((h - low) * reciprocal(step), 0, 2**self.bits - 1)
            codes = noise.rounded(index, random, self.bits)
        return Normalized(packing.pack(codes, self.bits), ends)

    def _codes_of_deviations(self, h: Array, random: Array, factor: Array) -> Array:
        levels = _DEVIATION[self.bits]
        floats, (slope, intercept) = levels.floats, levels.line
        position = levels.position_of(jnp.abs(h) * (factor * slope) + intercept)
        size = floats.fixed(jnp.minimum(position, levels.ends[1]))
        negative = lax.bitcast_convert_type(h, jnp.int32) >> 31  # -1 or 0
        middle = round(self._middle * 2**floats.point)
        return floats.rounded((size ^ negative) - negative + middle, random)

    @functools.partial(jax.jit, static_argnums=(0, 2), inline=True)
    def decode_normalized(
        self, code: "Normalized", shape: tuple[int, ...]
    ) -> Float[Array, "*shape"]:
        """Returns the float32 values that `encode_normalized` encoded."""
        codes = packing.unpack(code.packed, shape, self.bits).astype(jnp.float32)
        if self.scale_source == "range":
            low, step = equidistant(code.ends, self.bits)
            return codes * step + low
        levels, index = _DEVIATION[self.bits], codes - self._middle
        return with_sign(levels.multiple_of(jnp.abs(index)), index) * levels.unit

    @property
    def _middle(self) -> float:
        """The place of zero among the codes of `encode_normalized`."""
        return (2**self.bits - 1) / 2


class Preactivation(NamedTuple):
    """The arrays that `SignAware.encode_preactivation` stores.

    Attributes:
        packed: Packed codes.
        ends: Extremes of each channel of each sample in bfloat16; empty with `scale_source="norm"`.
        threshold: Threshold of the ReLU for each channel.
    """

    packed: tuple[Array, ...]
    ends: tuple[Array, ...]
    threshold: Array


class Normalized(NamedTuple):
    """The arrays that `SignAware.encode_normalized` stores.

    Attributes:
        packed: Packed codes.
        ends: Extremes of each channel of each sample in bfloat16; empty with `scale_source="norm"`.
    """

    packed: tuple[Array, ...]
    ends: tuple[Array, ...]
