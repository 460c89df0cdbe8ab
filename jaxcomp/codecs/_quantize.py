"""Uniform quantization to a few bits with stochastic rounding."""

import dataclasses
import functools
import math
from typing import ClassVar, Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxcomp._core.barriers import undifferentiable
from jaxcomp._core.integers import as_integer
from jaxcomp._core.layouts import row_major_on_one_gpu
from jaxcomp.codecs import noise, packing
from jaxcomp.codecs._codec import Codec, Encoded, Seed, array_nbytes, channel_axes
from jaxcomp.codecs._ranges import least_and_greatest

Grouping = Literal["channel", "sample", "row"]
Rounding = Literal["stochastic", "nearest", "dither"]
_LEAST = 16  # values of a channel whose extremes take no more bytes than their codes of 4 bits


@dataclasses.dataclass(frozen=True)
class Quantize(Codec):
    """Quantizes each value to one of 2^bits equidistant levels between the extremes of its group.

    The extremes are stored in the array's dtype. The smallest and the largest value of a group
    decode exactly, and so does a constant group. Exceptions: a range below 2^-114 decodes to its
    smallest value, the sign of a zero may change, and subnormal numbers become zero on devices that
    flush them. On a CPU the largest number of float32 may decode to Inf in a group that also holds
    the lowest.

    A step is (max - min) / (2^bits - 1) of the group. With stochastic rounding the decoded value is
    unbiased to 2^-17 of a step (2^-14 with 8 bits, where the level itself is rounded), and the
    error is at most one step. With nearest rounding the decoded value is biased, and the error is
    at most half a step. Rounding the decoded value to the array's dtype adds half a unit in its
    last place.

    "dither" adds noise before rounding to the nearest level, and subtracts the same noise from the
    level. The decoded value is unbiased, the error is at most half a step, and its variance, a
    twelfth of a squared step, is half of that of stochastic rounding on average. It does not depend
    on the value, so a decoded extreme is no longer exact; a constant group is. The noise is a
    hash of an element's place and of a sample of the array's values (`noise.salt`), and its words,
    one for each index along each axis, are stored.

    A group with a NaN or Inf decodes to NaN; other groups are unaffected. Groups never cross
    samples (axis 0). An array of one axis is one group.

    Source: ActNN (Chen et al., ICML 2021, arXiv:2104.14129, section 3.2). Unlike there, groups
    follow the array's axes instead of 256 consecutive values, and extremes are exact. Subtractive
    dither: Roberts 1962, "Picture coding using pseudo-random noise".

    Attributes:
        bits: Bits per element: 1, 2, 3, 4, 5, 6 or 8.
        group: Values that share a range. "channel": the values of one sample and one index of the
            last axis; for arrays of fewer than 3 axes, and where a channel would have fewer than 16
            values, the values of one sample. "sample": the values of one sample. "row": the values
            along the last axis.
        rounding: "stochastic", "nearest" or "dither".

    Raises:
        ValueError: If an attribute is invalid.

    Example:
        >>> codec = Quantize(bits=2)
        >>> codec.nbytes((8, 16, 16, 32), jnp.bfloat16)  # codes + two extremes a channel
        17408
        >>> x = jnp.linspace(0.0, 3.0, 4)[None]
        >>> codec.decode(codec.encode(x)).round(5).tolist()
        [[0.0, 1.0, 2.0, 3.0]]
    """

    bits: int = 2
    group: Grouping = "channel"
    rounding: Rounding = "stochastic"
    name: ClassVar[str] = "quantize"

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", as_integer(self.bits))
        packing.check_bits(self.bits)
        if self.group not in get_args(Grouping):
            raise ValueError(f"group={self.group!r}: expected one of {get_args(Grouping)}")
        if self.rounding not in get_args(Rounding):
            raise ValueError(f"rounding={self.rounding!r}: expected one of {get_args(Rounding)}")

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        """Whether rounding is not to the nearest level, so that the decoded value is unbiased."""
        return self.rounding != "nearest"

    def nbytes(self, shape: tuple[int, ...], dtype: DTypeLike) -> int:
        """Returns the exact size in bytes, as `Codec.nbytes`; only the packing is traced for it."""
        self.check(shape, dtype)
        pack = functools.partial(packing.pack, bits=self.bits)
        packed = jax.eval_shape(pack, jax.ShapeDtypeStruct(shape, jnp.int32))
        axes = self.range_axes(shape)
        groups = tuple(1 if axis in axes else size for axis, size in enumerate(shape))
        ends = 2 * array_nbytes(groups, dtype)
        words = 4 * sum(shape) if self.rounding == "dither" else 0
        return sum(array_nbytes(a.shape, a.dtype) for a in packed) + ends + words

    def range_axes(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the axes over which values share a range."""
        rank = len(shape)
        if self.group == "row":
            return tuple(range(rank))[-1:]
        of_channel = channel_axes(rank)
        if self.group == "channel" and math.prod(shape[i] for i in of_channel) >= _LEAST:
            return of_channel
        return tuple(range(1 if rank > 1 else 0, rank))

    def extremes(self, x: Array) -> tuple[Array, Array]:
        """Returns the smallest and the largest value of each group.

        Args:
            x: Floating-point array; axis 0 is the batch.

        Returns:
            Two arrays in the dtype of `x` that broadcast to `x`. Both are NaN for a group with a
            NaN or Inf.
        """
        low, high = least_and_greatest(x, self.range_axes(x.shape))
        finite = jnp.isfinite(low) & jnp.isfinite(high)
        return jnp.where(finite, low, jnp.nan), jnp.where(finite, high, jnp.nan)

    def encode_between(self, x: Array, low: Array, high: Array, seed: Seed) -> tuple[Array, ...]:
        """Quantizes values between known extremes.

        Args:
            x: Floating-point array.
            low: Smallest value of each group, as `extremes` returns it.
            high: Largest value of each group, as `extremes` returns it.
            seed: Integer scalar that selects the rounding noise.

        Returns:
            The arrays to store: packed codes, `low`, `high` and, with "dither", the noise's words.
        """
        # Division by 16: the largest range does not overflow, its reciprocal does not underflow.
        value, least, most = (a.astype(jnp.float32) / 16 for a in (x, low, high))
        span = most - least
        top = 2**self.bits - 1
        spread = span > top * jnp.finfo(jnp.float32).tiny
        steps = jnp.where(spread, top / jnp.where(spread, span, 1.0), 0.0)
        level = jnp.clip((value - least) * steps, 0, top)
        words: tuple[Array, ...] = ()
        if self.rounding == "dither":
            words = noise.axis_words(x.shape, noise.salt(seed, x))
            random = noise.of_axes(words) if words else jnp.asarray(noise.HALF)
        elif self.rounding == "stochastic":
            random = noise.words(x, seed)
        else:
            random = jnp.asarray(noise.HALF)
        return *packing.pack(noise.rounded(level, random, self.bits), self.bits), low, high, *words

    def encode_within(self, x: Array, low: float, high: float, seed: Seed) -> Encoded:
        """Encodes values between two known numbers, without a pass that computes their range.

        The range is widened until every level is a number of the array's dtype. Levels that all
        arrays share would otherwise be rounded the same way everywhere, which is a bias. A NaN
        decodes to one of the two numbers, unlike with `encode`.

        Args:
            x: Floating-point array.
            low: Lower bound of all values.
            high: Upper bound of all values, greater than `low`.
            seed: Integer scalar that selects the rounding noise.

        Returns:
            The encoded array, as from `encode`.
        """
        x = undifferentiable(x)
        with jax.named_scope(self.stored_name()):
            ends = _on_grid(low, high, 2**self.bits - 1, float(jnp.finfo(x.dtype).eps))
            least, most = (jnp.full((1,) * x.ndim, end, x.dtype) for end in ends)
            return Encoded(self.encode_between(x, least, most, seed), x.shape, x.dtype, self)

    def _encode(self, x: Array, seed: Seed) -> tuple[Array, ...]:
        return self.encode_between(x, *self.extremes(x), seed)

    def _decode(self, arrays: tuple[Array, ...], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        words = arrays[len(arrays) - len(shape) :] if self.rounding == "dither" else ()
        *packed, low, high = arrays[: len(arrays) - len(words)]
        codes = packing.unpack(tuple(packed), shape, self.bits).astype(jnp.float32)
        if words:
            codes += 0.5 - noise.fraction(noise.of_axes(words))
        top = 2**self.bits - 1
        # A weight of `low` and one of `high`, which are 0 and 1 at the extremes. Both come out of a
        # difference: XLA may reorder products and round them.
        of_low = 1.0 - codes * (1.0 / top)
        of_high = 1.0 - of_low
        value = low.astype(jnp.float32) * of_low + high.astype(jnp.float32) * of_high
        # XLA would otherwise take the order that a product prefers, also for the array that was
        # encoded, and transpose that. Of five axes, as of volumes, its own order is the better one:
        # it convolves these with the channels first.
        value = value.astype(dtype)
        return value if value.ndim == 5 else row_major_on_one_gpu(value)


def _on_grid(low: float, high: float, steps: int, eps: float) -> tuple[float, float]:
    """Widens a range so that it has `steps` equal steps between numbers of one precision."""
    _, exponent = math.frexp(max(-low, high))
    while True:
        unit = eps * 2.0 ** (exponent - 1)  # distance of the largest numbers below 2^exponent
        least = math.floor(low / unit)
        most = least + steps * math.ceil((high / unit - least) / steps)
        if max(-least, most) * unit <= 2.0**exponent:
            return least * unit, most * unit
        exponent += 1
