"""Uniform quantization that gives more bits to the samples that need more."""

import dataclasses
import itertools
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxcomp._core.integers import as_integer
from jaxcomp.codecs import noise
from jaxcomp.codecs._codec import Codec, Encoded, Seed
from jaxcomp.codecs._quantize import Quantize

WIDTHS = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True)
class PerSample(Codec):
    """Quantizes each sample by `Quantize`, with a number of bits that depends on its rank.

    Samples are ranked within runs. A run is `len(bits)` consecutive samples. The rank is by the sum
    of the squared ranges of a sample's groups, times `importance` if it is given. The first rank
    gets `bits[0]`, and so on. Shapes are therefore static, and no value is sent to the host. A
    batch that is sharded in whole runs needs no communication. Samples after the last whole run get
    the largest of 1, 2, 4 and 8 bits that does not exceed the mean of `bits`. A sample with a NaN
    or Inf gets the last rank; it decodes to NaN as by `Quantize`.

    Bias and error bound are those of `Quantize` with stochastic rounding.

    Source: ActNN (Chen et al., ICML 2021, arXiv:2104.14129, section 4.1). ActNN computes the bits
    on the host in every step.

    Attributes:
        bits: Bits per element for each rank: 2 to 256 of the values 1, 2, 4 and 8, in descending
            order.

    Raises:
        ValueError: If `bits` is not such a tuple. On encoding: if the array has fewer than two
            axes.

    Example:
        >>> codec = PerSample(bits=(4, 2, 1, 1))
        >>> 8 * codec.nbytes((4, 64, 64, 8), jnp.float32) / (4 * 64 * 64 * 8)  # with metadata
        2.015869140625
    """

    bits: tuple[int, ...] = (4, 2, 1, 1)
    name: ClassVar[str] = "per_sample"
    kinds = ("conv", "dot", "batch_norm", "layer_norm")
    unbiased = True

    def __post_init__(self) -> None:
        bits = tuple(map(as_integer, self.bits)) if isinstance(self.bits, tuple) else self.bits
        object.__setattr__(self, "bits", bits)
        fits = isinstance(bits, tuple) and 2 <= len(bits) <= 256 and set(bits) <= set(WIDTHS)
        if not fits or list(bits) != sorted(bits, reverse=True):
            raise ValueError(
                f"bits={bits!r}: expected 2 to 256 of {WIDTHS} in a tuple, none above its "
                "predecessor"
            )

    def check(self, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        """Checks that the array is floating-point and has a batch axis and another one.

        Args:
            shape: Shape of the array.
            dtype: Dtype of the array.

        Raises:
            TypeError: If `dtype` is not float32, bfloat16 or float16.
            ValueError: If the array has fewer than two axes.
        """
        super().check(shape, dtype)
        if len(shape) < 2:
            raise ValueError(f"PerSample stores arrays of samples; got shape {shape}")

    def encode(
        self, x: Array, seed: Seed = None, importance: Float[Array, " batch"] | None = None
    ) -> Encoded:
        """Encodes an array; arguments as in `Codec.encode`.

        Raises:
            TypeError: If `x` is not a float32, bfloat16 or float16 array.
            ValueError: If `x` has fewer than two axes, or `importance` is not of shape (batch,).
        """
        self._check_array(x)
        if importance is not None and importance.shape != x.shape[:1]:
            raise ValueError(f"importance of shape {importance.shape}: expected {x.shape[:1]}")
        with jax.named_scope(self.stored_name()):
            return Encoded(self._encode(x, seed, importance), x.shape, x.dtype, self)

    def _encode(self, x: Array, seed: Seed, importance: Array | None = None) -> tuple[Array, ...]:
        whole = self._whole(x.shape)
        low, high = Quantize().extremes(x)
        ranked = self._in_runs(x), self._in_runs(low), self._in_runs(high)
        squares = jnp.square(high.astype(jnp.float32) - low.astype(jnp.float32))
        needs = squares.sum(range(1, x.ndim))[:whole]
        if importance is not None:
            needs *= importance[:whole]
        needs = jnp.where(jnp.isnan(needs), -1.0, needs).reshape(-1, len(self.bits))
        order = jnp.argsort(needs, axis=1, descending=True, stable=True)
        stored = [order.astype(jnp.uint8)]
        classes = self._classes()
        # One seed for each class, because each class starts its element index at 0.
        seeds = jnp.asarray(0 if seed is None else seed, jnp.uint32) + jnp.arange(
            len(classes) + 1, dtype=jnp.uint32
        ) * jnp.uint32(noise.GOLDEN)
        for i, (bits, ranks) in enumerate(classes):
            chosen = (_take(a, order[:, ranks]) for a in ranked)
            x_class, low_class, high_class = (a.reshape(-1, *a.shape[2:]) for a in chosen)
            stored += Quantize(bits).encode_between(x_class, low_class, high_class, seeds[i])
        if whole < x.shape[0]:
            stored += self._rest.encode(x[whole:], seeds[-1]).arrays
        return tuple(stored)

    def _decode(self, arrays: tuple[Array, ...], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        order, *stored = arrays
        codes = [tuple(stored[i : i + 3]) for i in range(0, len(stored), 3)]
        runs = order.shape[0]
        parts = []
        for (bits, ranks), code in zip(self._classes(), codes, strict=False):
            count = ranks.stop - ranks.start
            part = Quantize(bits)._decode(code, (runs * count, *shape[1:]), dtype)
            parts.append(part.reshape(runs, count, *shape[1:]))
        place = jnp.argsort(order, axis=1)  # the inverse of `order`
        x = _take(jnp.concatenate(parts, axis=1), place).reshape(-1, *shape[1:])
        left = shape[0] % len(self.bits)
        if not left:
            return x
        rest = self._rest._decode(codes[-1], (left, *shape[1:]), dtype)
        return jnp.concatenate([x, rest])

    def _classes(self) -> list[tuple[int, slice]]:
        """Returns each number of bits with the ranks that get it."""
        ends = list(itertools.accumulate(len([*g]) for _, g in itertools.groupby(self.bits)))
        widths = [bits for bits, _ in itertools.groupby(self.bits)]
        starts = [0, *ends[:-1]]
        return [(b, slice(i, j)) for b, i, j in zip(widths, starts, ends, strict=True)]

    def _whole(self, shape: tuple[int, ...]) -> int:
        """Returns the number of samples in whole runs."""
        return shape[0] - shape[0] % len(self.bits)

    def _in_runs(self, x: Array) -> Array:
        whole = self._whole(x.shape)
        return x[:whole].reshape(-1, len(self.bits), *x.shape[1:])

    @property
    def _rest(self) -> Quantize:
        """Codec for the samples after the last whole run."""
        mean = sum(self.bits) / len(self.bits)
        return Quantize(max(width for width in WIDTHS if width <= mean))


def _take(x: Array, index: Int[Array, "runs count"]) -> Array:
    """Returns the samples of each run that `index` selects."""
    return jax.vmap(lambda run, i: run[i])(x, index)
