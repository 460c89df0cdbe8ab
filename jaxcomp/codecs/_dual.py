"""Window means in bfloat16, and the differences to them quantized to a few bits."""

import dataclasses
import math
from typing import ClassVar, Literal, get_args

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxcomp._core.integers import as_integer
from jaxcomp.codecs import packing
from jaxcomp.codecs._codec import Codec, Seed
from jaxcomp.codecs._pool import AvgPool
from jaxcomp.codecs._quantize import Quantize
from jaxcomp.codecs._rounding import to_bfloat16

Along = Literal["map", "features"]


@dataclasses.dataclass(frozen=True)
class DualPrecision(Codec):
    """Stores window means in bfloat16, and the differences to them by `Quantize`. Unbiased.

    The means are those of `AvgPool`. The differences have a smaller range than the values, so the
    quantization step is smaller. The differences are taken to the stored means, so the decoded
    value is unbiased up to half a unit in the last place of the array's dtype. The error is at most
    one step of `Quantize` for the differences. A value that would be decoded beyond the largest
    number of the array's dtype decodes to that. A NaN or Inf makes all values of its channel
    non-finite.

    Source: DIVISION (Wang et al., ICML 2023, arXiv:2208.04187, section 3). The published code
    shifts the windows if they do not divide the map; here the last windows are smaller.

    Attributes:
        window: Edge of the window in elements. An axis that is smaller than `window` limits it.
        bits: Bits per element of the differences: 1, 2, 3, 4, 5, 6 or 8.
        along: Axes of a window. "map" means all axes but the first (batch) and the last (channels).
            "features" means the last axis. Arrays of fewer than 3 axes always use the last axis.

    Raises:
        ValueError: If `window` is not a positive integer, or `bits` or `along` is invalid.

    Example:
        >>> codec = DualPrecision(window=8, bits=2)
        >>> round(8 * codec.nbytes((1, 56, 56, 32), jnp.bfloat16) / (56 * 56 * 32), 2)  # bits
        2.26
        >>> codec.decode(codec.encode(jnp.array([[1.0, 2.0]]))).tolist()
        [[1.0, 2.0]]
    """

    window: int = 8
    bits: int = 2
    along: Along = "map"
    name: ClassVar[str] = "dual_precision"
    unbiased = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "window", as_integer(self.window))
        object.__setattr__(self, "bits", as_integer(self.bits))
        AvgPool(self.window)
        packing.check_bits(self.bits)
        if self.along not in get_args(Along):
            raise ValueError(f"along={self.along!r}: expected one of {get_args(Along)}")

    def _encode(self, x: Array, seed: Seed) -> tuple[Array, ...]:
        features = self._as_map(x.shape)
        pool = self._pool(features)
        (means,) = pool._encode(x.reshape(features), None)
        if x.dtype != jnp.bfloat16:  # the largest numbers would round to Inf
            most = float(jnp.finfo(jnp.bfloat16).max)
            means = jnp.clip(means.astype(jnp.float32), -most, most)
        means = to_bfloat16(means)
        # Halves: the largest difference does not overflow.
        half = pool._decode((means.astype(jnp.float32) / 2,), features, jnp.float32)
        rest = (x.astype(jnp.float32) / 2 - half.reshape(x.shape)).astype(x.dtype)
        return means, *self._rest._encode(rest, seed)

    def _decode(self, arrays: tuple[Array, ...], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        means, *coded = arrays
        features = self._as_map(shape)
        low = self._pool(features)._decode((means.astype(jnp.float32) / 2,), features, jnp.float32)
        rest = self._rest._decode(tuple(coded), shape, jnp.float32)
        most = float(jnp.finfo(dtype).max)
        half = lax.clamp(-most / 2, low.reshape(shape) + rest, most / 2)
        return (half * 2).astype(dtype)

    @property
    def _rest(self) -> Quantize:
        return Quantize(self.bits)

    def _pool(self, features: tuple[int, ...]) -> AvgPool:
        return AvgPool(max(1, min(self.window, *features[1:-1])))

    def _as_map(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape as (batch, pooled axes..., channels)."""
        if self.along == "map" and len(shape) > 2:
            return shape
        return (math.prod(shape[:-1]), *(shape[-1:] or (1,)), 1)
