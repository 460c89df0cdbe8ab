"""Average pooling of saved activations."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, UInt32

from jaxcomp._core.integers import as_integer
from jaxcomp.codecs import noise
from jaxcomp.codecs._codec import Codec, Encoded, Seed
from jaxcomp.codecs._offload import inner_codec


@dataclasses.dataclass(frozen=True)
class AvgPool(Codec):
    """Stores the mean of each window of a channels-last feature map. Biased by default.

    Variation inside a window is lost. A convolution's weight gradient therefore lacks the
    covariance of input and cotangent within windows. The error is at most the range of the values
    in a window. Windows do not overlap. If `window` does not divide an axis, the last windows are
    smaller. Encoding a decoded array again gives the same code up to rounding.

    With `deviation`, one element of each window is drawn at random, and its difference from the
    mean is stored, too. The element decodes to the mean and the difference times the number of
    elements of the window, all others to the mean. So the decoded value is unbiased if `deviation`
    is. Its variance is that of the values in a window times the number of its elements less one.
    What exceeds the largest number of the dtype becomes Inf.
    No index is stored: it is a hash of the window's place and of a sample of the array's values
    (`noise.salt`), whose words, one for each index along each axis, are stored.

    Source: Barley and Fröning, "Less Memory Means smaller GPUs" (arXiv:2409.11902), without
    `deviation`.

    Attributes:
        window: Edge of the window in elements, along each spatial axis. Spatial axes are all but
            the first (batch) and the last (channels).
        deviation: Codec of the differences from the means; None stores none.

    Raises:
        TypeError: If `deviation` is not a codec.
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
    deviation: Codec | None = None
    name: ClassVar[str] = "avg_pool"
    kinds = ("conv",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "window", as_integer(self.window))
        if type(self.window) is not int or self.window < 1:
            raise ValueError(f"window={self.window!r}: expected a positive integer")
        if self.deviation is not None and not isinstance(self.deviation, Codec):
            raise TypeError(f"deviation={self.deviation!r}: expected a codec such as Quantize(2)")

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        """Whether differences from the means are stored, without bias."""
        return self.deviation is not None and self.deviation.unbiased

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
        # A power of two is exact and keeps the sum of the largest floats finite.
        scale = 0.5 ** (self.window ** len(x.shape[1:-1])).bit_length()
        sums = self.sums(x.astype(jnp.float32) * scale)
        means = (sums / (self._sizes(x.shape) * scale)).astype(x.dtype)
        if self.deviation is None:
            return (means,)
        words = noise.axis_words(means.shape, noise.salt(seed, x))
        elements = self._windows(x.astype(jnp.float32))
        drawn = jnp.where(self._is_drawn(x.shape, words), elements, 0).sum(self._inner(x.ndim))
        difference = (drawn - means.astype(jnp.float32)).astype(x.dtype)
        return means, *words, *self.deviation.encode(difference, seed).arrays

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
        means, *others = arrays
        inner = self._inner(len(shape))
        wide = list(jnp.expand_dims(means, inner).shape)
        for axis in inner:
            wide[axis] = self.window
        x = jnp.broadcast_to(jnp.expand_dims(means, inner), wide)
        if self.deviation is not None:
            words, code = tuple(others[: len(shape)]), tuple(others[len(shape) :])
            difference = Encoded(code, means.shape, means.dtype, inner_codec(self.deviation))
            values = self.deviation.decode(difference).astype(jnp.float32) * self._sizes(shape)
            added = jnp.where(self._is_drawn(shape, words), jnp.expand_dims(values, inner), 0)
            x = (x.astype(jnp.float32) + added).astype(dtype)
        padded = tuple(n * self.window for n in means.shape[1:-1])
        x = x.reshape(shape[0], *padded, shape[-1])
        return x[tuple(slice(n) for n in shape)]

    def _is_drawn(self, shape: tuple[int, ...], words: tuple[UInt32[Array, "..."], ...]) -> Array:
        """Returns whether each element is the drawn one, for the array that `_windows` returns."""
        random, inner = noise.of_axes(words), self._inner(len(shape))
        drawn = jnp.ones((1,) * (random.ndim + len(inner)), bool)
        for i, (axis, size) in enumerate(zip(inner, shape[1:-1], strict=True)):
            along = [1] * random.ndim
            along[i + 1] = -1
            counts = self._counts(size).reshape(along).astype(np.float32)
            place = jnp.floor(noise.fraction(noise.other_words(random, i)) * counts)
            place = jnp.expand_dims(place.astype(jnp.int32), inner)
            within = [1] * place.ndim
            within[axis] = self.window
            drawn = drawn & (place == lax.broadcasted_iota(jnp.int32, within, axis))
        return drawn

    def _sizes(self, shape: tuple[int, ...]) -> np.ndarray:
        """Returns the number of elements in each window, of size 1 along batch and channels."""
        sizes = np.ones(1)
        for size in shape[1:-1]:
            sizes = np.multiply.outer(sizes, self._counts(size))
        return sizes[..., None].astype(np.float32)

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
