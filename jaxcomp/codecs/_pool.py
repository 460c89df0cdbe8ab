"""Average pooling of saved activations."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxcomp._core.integers import as_integer
from jaxcomp.codecs._codec import Codec, Seed


@dataclasses.dataclass(frozen=True)
class AvgPool(Codec):
    """Stores the mean of each window of a channels-last feature map. Biased.

    Variation inside a window is lost. A convolution's weight gradient therefore lacks the
    covariance of input and cotangent within windows. The error is at most the range of the values
    in a window. Windows do not overlap. If `window` does not divide an axis, the last windows are
    smaller. Encoding a decoded array again gives the same code up to rounding.

    Source: Barley and Fröning, "Less Memory Means smaller GPUs" (arXiv:2409.11902).

    Attributes:
        window: Edge of the window in elements, along each spatial axis. Spatial axes are all but
            the first (batch) and the last (channels).

    Raises:
        ValueError: If `window` is not a positive integer. On encoding: if the array has no spatial
            axis, or one that is smaller than `window`.

    Example:
        >>> AvgPool(window=2).nbytes((8, 7, 7, 32), jnp.float32)  # 8 * 4 * 4 * 32 values
        16384
        >>> codec = AvgPool(window=2)
        >>> codec.decode(codec.encode(jnp.array([1.0, 3.0, 7.0])[None, :, None])).ravel().tolist()
        [2.0, 2.0, 7.0]
    """

    window: int = 2
    name: ClassVar[str] = "avg_pool"
    kinds = ("conv",)
    unbiased = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "window", as_integer(self.window))
        if type(self.window) is not int or self.window < 1:
            raise ValueError(f"window={self.window!r}: expected a positive integer")

    def check(self, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        """Checks that an array of this shape and dtype can be pooled.

        Args:
            shape: Shape of the array, (batch, spatial..., channels).
            dtype: Dtype of the array.

        Raises:
            TypeError: If `dtype` is not float32, bfloat16 or float16.
            ValueError: If the array has no spatial axis, or one that is smaller than `window`.
        """
        super().check(shape, dtype)
        if len(shape) < 3:
            raise ValueError(f"AvgPool needs shape (batch, spatial..., channels); got {shape}")
        if min(shape[1:-1]) < self.window:
            raise ValueError(f"window={self.window} is larger than the map of shape {shape}")

    def _encode(self, x: Array, seed: Seed) -> tuple[Array, ...]:
        spatial = x.shape[1:-1]
        counts = np.ones(1)
        for size in spatial:
            counts = np.multiply.outer(counts, self._counts(size))
        # A power of two is exact and keeps the sum of the largest floats finite.
        scale = 0.5 ** (self.window ** len(spatial)).bit_length()
        sums = self.sums(x.astype(jnp.float32) * scale)
        return ((sums / (counts[..., None] * scale).astype(np.float32)).astype(x.dtype),)

    def sums(self, x: Array) -> Array:
        """Returns the sum of each window.

        Args:
            x: Array of shape (batch, spatial..., channels).

        Returns:
            float32 array with the axes of `x`; each spatial axis has one element per window.

        Example:
            >>> AvgPool(window=2).sums(jnp.array([1.0, 3.0, 7.0])[None, :, None]).ravel().tolist()
            [4.0, 7.0]
        """
        return jnp.sum(self._windows(x.astype(jnp.float32)), axis=self._inner(x.ndim))

    def _decode(self, arrays: tuple[Array, ...], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        (means,) = arrays
        inner = self._inner(len(shape))
        wide = list(jnp.expand_dims(means, inner).shape)
        for axis in inner:
            wide[axis] = self.window
        x = jnp.broadcast_to(jnp.expand_dims(means, inner), wide)
        padded = tuple(n * self.window for n in means.shape[1:-1])
        x = x.reshape(shape[0], *padded, shape[-1])
        return x[tuple(slice(n) for n in shape)]

    def _counts(self, size: int) -> np.ndarray:
        """Returns the number of elements in each window along an axis of this size."""
        starts = np.arange(0, size, self.window)
        return np.minimum(self.window, size - starts)

    def _inner(self, rank: int) -> tuple[int, ...]:
        """Returns the axes inside a window, for the array that `_windows` returns."""
        return tuple(range(2, 2 * rank - 3, 2))

    def _windows(self, x: Array) -> Array:
        """Splits every spatial axis into (windows, window), padded with zeros."""
        padding = [(0, 0), *((0, -n % self.window) for n in x.shape[1:-1]), (0, 0)]
        split = [n for size in x.shape[1:-1] for n in (-(-size // self.window), self.window)]
        return jnp.pad(x, padding).reshape(x.shape[0], *split, x.shape[-1])
