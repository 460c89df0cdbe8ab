"""Floating-point numbers of 8 bits with a scale for each block of 32."""

import dataclasses
from typing import Any, ClassVar, Literal, get_args

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxcomp._core.integers import as_integer
from jaxcomp.codecs import noise
from jaxcomp.codecs._codec import Codec, Seed
from jaxcomp.codecs._quantize import Rounding

Format = Literal["e4m3", "e5m2"]

_BLOCK = 32
_LEAST = -120  # exponent of a scale, so that its inverse is finite
# Of float32.
_SIGN, _ALL_BUT_SIGN = -(2**31), 2**31 - 1
_EXPONENT, _BIAS, _INFINITE = 23, 127, 0xFF << 23
_FRACTION, _THREE_QUARTERS = 2**23 - 1, 3 * 2**21


@dataclasses.dataclass(frozen=True)
class _Kind:
    """A format of 8 bits: its dtype, bits of the mantissa, least exponent, exponent of the largest.

    The largest number is 1.75 times a power of two in either format.
    """

    dtype: Any
    mantissa: int
    least: int
    largest: int


_KINDS: dict[str, _Kind] = {
    "e4m3": _Kind(jnp.float8_e4m3fn, 3, -6, 8),
    "e5m2": _Kind(jnp.float8_e5m2, 2, -14, 15),
}


@dataclasses.dataclass(frozen=True)
class Float8(Codec):
    """Stores floating-point numbers of 8 bits; each block of 32 has a scale, a power of two.

    An element takes 8.25 bits. The scale is the least with which the largest value of the block has
    a code. The distance of two codes is at most an eighth ("e4m3") or a fourth ("e5m2") of the
    value, or 2^-9 or 2^-16 of the scale where that is more. With stochastic rounding the error is
    less than this distance, and the decoded value is unbiased to 2^-17 of it. With nearest rounding
    it is at most half of it, and biased. A value that would be rounded beyond the largest number of
    the array's dtype decodes to that.

    A NaN or Inf decodes to NaN; other values of the block are unaffected. Blocks never cross
    samples (axis 0) of an array of two axes or more.

    Source: the scales and formats are those of MXFP8 (OCP Microscaling Formats, version 1.0, 2023,
    section 5.3); there the largest values of a block may be clipped.

    Attributes:
        format: "e4m3" or "e5m2".
        axis: Axis along which blocks lie; -1 are the features, -2 the tokens of an array
            (batch, tokens, features), which the gradient of a weight contracts.
        rounding: "stochastic" or "nearest".

    Raises:
        TypeError: If `axis` is no integer.
        ValueError: If an attribute is invalid. On encoding: if the array has no such axis, or if it
            is that of the samples.

    Example:
        >>> codec = Float8()
        >>> codec.nbytes((8, 128, 64), jnp.bfloat16)  # a byte an element, and one for 32 elements
        67584
        >>> codec.decode(codec.encode(jnp.array([[1.0, -448.0, 0.0]]))).tolist()
        [[1.0, -448.0, 0.0]]
    """

    format: Format = "e4m3"
    axis: int = -1
    rounding: Rounding = "stochastic"
    name: ClassVar[str] = "float8"

    def __post_init__(self) -> None:
        for field, allowed in (("format", Format), ("rounding", Rounding)):
            if getattr(self, field) not in get_args(allowed):
                raise ValueError(
                    f"{field}={getattr(self, field)!r}: expected one of {get_args(allowed)}"
                )
        object.__setattr__(self, "axis", as_integer(self.axis))
        if type(self.axis) is not int:
            raise TypeError(f"axis={self.axis!r}: expected an integer, such as -1")
        if self.axis >= 0:
            raise ValueError(f"axis={self.axis}: expected a negative number, counted from the last")

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        """Whether rounding is stochastic, so that the decoded value is unbiased."""
        return self.rounding == "stochastic"

    def check(self, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        """Checks that the array is floating-point and has the axis of the blocks.

        Args:
            shape: Shape of the array.
            dtype: Dtype of the array.

        Raises:
            TypeError: If the codec cannot store `dtype`.
            ValueError: If the array has no such axis, or it is that of the samples.
        """
        super().check(shape, dtype)
        least = 1 if len(shape) > 1 else 0
        if len(shape) + self.axis < least:
            raise ValueError(
                f"{self}: x of shape {shape} has no axis {self.axis} behind that of the samples"
            )

    def _encode(self, x: Array, seed: Seed) -> tuple[Array, ...]:
        # Bits in place of `jnp.where` and `jnp.frexp`: JAX moves their arrays of constants out of a
        # `jax.lax.scan`, where they would be kept.
        kind = _KINDS[self.format]
        bits = _bits(x.astype(jnp.float32))
        finite = -((bits & _ALL_BUT_SIGN) < _INFINITE).astype(jnp.int32)  # all ones, or zero
        size = bits & _ALL_BUT_SIGN & finite
        largest = _bits(_largest(_number(size), x.ndim + self.axis))
        above = (largest & _FRACTION) > _THREE_QUARTERS
        scale = (largest >> _EXPONENT) - _BIAS - kind.largest + above
        scale = jnp.maximum(scale, _LEAST)
        scaled = _number(size) * _power(-self._of_elements(scale, x.shape))
        exponent = (_bits(scaled) >> _EXPONENT) - _BIAS
        unit = jnp.maximum(exponent, kind.least) - kind.mantissa
        level = scaled * _power(-unit)
        random = noise.words(x, seed) if self.rounding == "stochastic" else jnp.asarray(noise.HALF)
        rounded = noise.rounded(level, random, kind.mantissa + 2).astype(jnp.float32) * _power(unit)
        signed = _number(_bits(rounded) | (bits & _SIGN) | ~finite)  # all ones are a NaN
        return signed.astype(kind.dtype), scale.astype(jnp.int8)

    def _decode(self, arrays: tuple[Array, ...], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        codes, scale = arrays
        value = codes.astype(jnp.float32)
        half = _power(self._of_elements(scale.astype(jnp.int32), shape) - 1)
        most = float(jnp.finfo(dtype).max)
        return lax.clamp(-most, value * half * 2, most).astype(dtype)  # 2^128 is not finite

    def _of_elements(self, scale: Array, shape: tuple[int, ...]) -> Array:
        """Returns the exponent of each element's scale."""
        axis = len(shape) + self.axis
        wide = (*scale.shape[: axis + 1], _BLOCK, *scale.shape[axis + 1 :])
        kept = [i for i in range(len(wide)) if i != axis + 1]
        whole = (*shape[:axis], scale.shape[axis] * _BLOCK, *shape[axis + 1 :])
        exponents = lax.broadcast_in_dim(scale, wide, kept).reshape(whole)
        return lax.slice_in_dim(exponents, 0, shape[axis], axis=axis)


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _number(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _power(exponent: Array) -> Array:
    """Returns two to the power of an integer from -126 to 127, exactly."""
    return _number((exponent + _BIAS) << _EXPONENT)


def _largest(x: Array, axis: int) -> Array:
    """Returns the largest number of each block."""
    blocks = -(-x.shape[axis] // _BLOCK)
    missing = blocks * _BLOCK - x.shape[axis]
    padded = lax.pad(x, 0.0, [(0, missing if i == axis else 0, 0) for i in range(x.ndim)])
    shape = (*x.shape[:axis], blocks, _BLOCK, *x.shape[axis + 1 :])
    return padded.reshape(shape).max(axis + 1, initial=0.0)
