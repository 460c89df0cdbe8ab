"""Max pooling that saves packed indices."""

import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxcomp._core import barriers
from jaxcomp.codecs import Codec, Encoded, Packed
from jaxcomp.codecs._offload import inner_codec

Padding = str | Sequence[tuple[int, int]]

INDEX = Packed(bits=4)


def max_pool(
    x: Float[Array, "batch ..."],
    window_shape: tuple[int, ...],
    strides: tuple[int, ...] | None = None,
    padding: Padding = "VALID",
    *,
    codec: Codec = INDEX,
) -> Float[Array, "batch ..."]:
    """Computes `flax.nnx.max_pool` and saves the index of each window's maximum.

    The result is bit-identical to Flax's. Among equal values, the first of a window gets the
    gradient, as in Flax.

    Args:
        x: Feature map of shape (batch, spatial..., channels).
        window_shape: Size of the window along each spatial axis.
        strides: Stride along each spatial axis. None is 1 for each axis, as in Flax.
        padding: "SAME", "VALID" or (low, high) for each spatial axis.
        codec: `Packed`, or `Offload` of it. 2^bits must be at least the number of values in a
            window.

    Returns:
        The maxima, in the dtype of `x`.

    Raises:
        ValueError: If `x` does not have a batch axis, a channel axis and one axis for each entry of
            `window_shape`; if `strides` or `padding` does not match `window_shape`; if a window is
            larger than the padded map; or if `codec` has too few bits.
        TypeError: If `codec` is not `Packed`.

    Example:
        >>> x = jnp.array([1.0, 5.0, 2.0, 2.0])[None, :, None]
        >>> jax.grad(lambda x: max_pool(x, (2,), (2,)).sum())(x).ravel().tolist()
        [0.0, 1.0, 1.0, 0.0]
    """
    check_index(window_shape, codec)
    window = Window(x.shape, window_shape, strides, padding)

    @jax.custom_vjp
    def op(x: Array) -> Array:
        return window.max(x)

    def forward(x: Array) -> tuple[Array, Encoded]:
        out = op(x)
        return barriers.save_residual(out, codec.encode(window.argmax(x)), codec)

    def backward(index: Encoded, cotangent: Array) -> tuple[Array]:
        index, cotangent = barriers.barrier_together(index, cotangent)
        return (window.scatter(codec.decode(index), cotangent),)

    op.defvjp(forward, backward)
    return op(x)


def check_index(window_shape: tuple[int, ...], codec: Codec) -> None:
    """Checks that a codec can store the index of every value of a window.

    Args:
        window_shape: Size of the window along each spatial axis.
        codec: The codec.

    Raises:
        ValueError: If the codec has too few bits.
        TypeError: If the codec is not `Packed`.
    """
    packed = inner_codec(codec)
    if not isinstance(packed, Packed):
        raise TypeError(f"codec={codec}: expected Packed, since an index is stored exactly")
    size = math.prod(window_shape)
    if size > 2**packed.bits:
        raise ValueError(f"codec={codec}: a window of {size} values needs more bits for its index")


def index_codec(window_shape: tuple[int, ...]) -> Packed:
    """Returns a codec with 4 or 8 bits that can store the index of every value of a window.

    Args:
        window_shape: Size of the window along each spatial axis.

    Raises:
        ValueError: If a window has more than 256 values.
    """
    codec = INDEX if math.prod(window_shape) <= 2**INDEX.bits else Packed(bits=8)
    check_index(window_shape, codec)
    return codec


class Window:
    """A sliding window over a feature map.

    Tap i of all windows is one strided slice of the padded map.

    Args:
        shape: Shape of the map, (batch, spatial..., channels).
        window: Size of the window along each spatial axis.
        strides: Stride along each spatial axis. None is 1 for each axis.
        padding: "SAME", "VALID" or (low, high) for each spatial axis.

    Raises:
        ValueError: As in `max_pool`.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        window: tuple[int, ...],
        strides: tuple[int, ...] | None,
        padding: Padding,
    ) -> None:
        if len(shape) != len(window) + 2:
            raise ValueError(
                f"x of shape {shape}: expected (batch, {len(window)} spatial axes, channels)"
            )
        window, strides = tuple(window), tuple(strides or (1,) * len(window))
        if any(size < 1 for size in window):
            raise ValueError(f"window_shape={window}: expected positive numbers")
        if len(strides) != len(window) or any(stride < 1 for stride in strides):
            raise ValueError(f"strides={strides}: expected a positive one for each of {window}")
        if not isinstance(padding, str) and (
            len(padding) != len(window) or min(map(min, padding)) < 0
        ):
            raise ValueError(f"padding={padding}: expected (low, high) for each of {window}")
        self.arguments = window, strides, padding
        self.index = index_codec(window)
        if isinstance(padding, str):
            padding = lax.padtype_to_pads(shape[1:-1], window, strides, padding)
        self.strides = (1, *strides, 1)
        self.padding = [(0, 0), *padding, (0, 0)]
        self.padded = [n + low + high for n, (low, high) in zip(shape, self.padding, strict=True)]
        spatial = zip(self.padded[1:-1], window, strides, strict=True)
        self.out = (shape[0], *((n - w) // s + 1 for n, w, s in spatial), shape[-1])
        if min(self.out[1:-1]) < 1:
            raise ValueError(f"window_shape={window} is larger than the padded map of {shape}")
        self.starts = [(0, *start, 0) for start in np.ndindex(*window)]

    def max(self, x: Array) -> Array:
        """Returns the maximum of each window, computed as in Flax."""
        return nnx.max_pool(x, *self.arguments)

    def argmax(self, x: Array) -> Int[Array, "..."]:
        """Returns the index of each window's first maximum.

        A NaN is replaced by the value after it, as in XLA.
        """
        x = self._pad(x, -jnp.inf)
        best, index = self._tap(x, self.starts[0]), jnp.zeros(self.out, jnp.int32)
        for i, start in enumerate(self.starts[1:], 1):
            value = self._tap(x, start)
            better = ~(best >= value)
            best, index = jnp.where(better, value, best), jnp.where(better, i, index)
        return index

    def gather(self, index: Int[Array, "..."], x: Array) -> Array:
        """Returns the value at the index of each window. Indices never point to padding."""
        x = self._pad(x, 0.0)
        taken = self._tap(x, self.starts[0])
        for i, start in enumerate(self.starts[1:], 1):
            taken = jnp.where(index == i, self._tap(x, start), taken)
        return taken

    def scatter(self, index: Int[Array, "..."], cotangent: Array) -> Array:
        """Adds each window's cotangent to the element at its index: the transpose of `gather`.

        Elements at the same position modulo the strides are reached by the same taps. Each such
        phase is a sum of shifted maps, which compilers do not expand before they add them.
        """
        spatial = range(1, cotangent.ndim - 1)
        strides = self.strides[1:-1]
        counts = [-(-self.padded[i] // self.strides[i]) for i in spatial]  # per phase
        zero = jnp.zeros((), cotangent.dtype)
        empty = jnp.zeros((len(cotangent), *counts, cotangent.shape[-1]), cotangent.dtype)
        phases = dict.fromkeys(itertools.product(*map(range, strides)), empty)
        for i, start in reversed(list(enumerate(self.starts))):  # in the order of the windows
            config = [(0, 0, 0)] * cotangent.ndim
            for j, count in zip(spatial, counts, strict=True):
                shift = start[j] // self.strides[j]
                config[j] = shift, count - self.out[j] - shift, 0
            part = lax.pad(jnp.where(index == i, cotangent, zero), zero, config)
            phases[tuple(start[j] % self.strides[j] for j in spatial)] += part
        for axis in reversed(spatial):
            phases = {
                outer: self._interleave(
                    [phases[*outer, i] for i in range(self.strides[axis])], axis
                )
                for outer in {phase[:-1] for phase in phases}
            }
        starts = [low for low, _ in self.padding]
        ends = [n - high for n, (_, high) in zip(self.padded, self.padding, strict=True)]
        return lax.slice(phases[()], starts, ends)

    @staticmethod
    def _interleave(maps: list[Array], axis: int) -> Array:
        shape = maps[0].shape
        size = shape[axis] * len(maps)
        return jnp.stack(maps, axis + 1).reshape(*shape[:axis], size, *shape[axis + 1 :])

    def _pad(self, x: Array, value: float) -> Array:
        return lax.pad(x, jnp.asarray(value, x.dtype), [(*pad, 0) for pad in self.padding])

    def _tap(self, x: Array, start: tuple[int, ...]) -> Array:
        limit = [
            first + (out - 1) * stride + 1
            for first, out, stride in zip(start, self.out, self.strides, strict=True)
        ]
        return lax.slice(x, start, limit, self.strides)
