"""Swin-T in Flax NNX: attention in windows that are shifted. Source: arXiv:2103.14030."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike


def relative_positions(window: int) -> np.ndarray:
    """The index of the offset of each pair of pixels in a window."""
    pixels = np.stack(np.meshgrid(*2 * [np.arange(window)], indexing="ij")).reshape(2, -1)
    rows, columns = pixels[:, :, None] - pixels[:, None] + window - 1
    return rows * (2 * window - 1) + columns


def shift_mask(size: int, window: int, shift: int) -> np.ndarray:
    """Which pairs of pixels of each window were neighbours before the shift."""
    parts = np.arange(size)
    of_axis = (parts >= size - window).astype(int) + (parts >= size - shift)
    ids = (3 * of_axis[:, None] + of_axis)[None, :, :, None]
    flat = np.asarray(windows(ids, window))[..., 0]
    return flat[:, :, None] == flat[:, None]


def windows(x: Any, window: int) -> Any:
    """The pixels of each window: (images * windows, pixels, features)."""
    count, height, width, features = x.shape
    x = x.reshape(count, height // window, window, width // window, window, features)
    return x.swapaxes(2, 3).reshape(-1, window * window, features)


def joined(x: jax.Array, window: int, size: int) -> jax.Array:
    """The images of windows."""
    n = size // window
    x = x.reshape(-1, n, n, window, window, x.shape[-1])
    return x.swapaxes(2, 3).reshape(-1, size, size, x.shape[-1])


class WindowAttention(nnx.Module):
    """Attention in each window, with a trained bias of each offset."""

    def __init__(
        self, width: int, heads: int, window: int, *, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        self.qkv = nnx.Linear(width, 3 * width, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(width, width, dtype=dtype, rngs=rngs)
        init = nnx.initializers.truncated_normal(0.02)
        self.bias = nnx.Param(init(rngs.params(), ((2 * window - 1) ** 2, heads)))
        self.heads, self.window = heads, window

    def __call__(self, x: jax.Array, mask: np.ndarray | None) -> jax.Array:
        q, k, v = (
            part.reshape(*x.shape[:2], self.heads, -1)
            for part in jnp.split(self.qkv(x), 3, axis=-1)
        )
        scores = jnp.einsum("nqhd,nkhd->nhqk", q * q.shape[-1] ** -0.5, k)
        bias = self.bias[...][relative_positions(self.window)].transpose(2, 0, 1)
        scores += bias.astype(scores.dtype)[None]
        if mask is not None:
            of_images = scores.reshape(-1, len(mask), *scores.shape[1:])
            scores = jnp.where(mask[None, :, None], of_images, -100.0).reshape(scores.shape)
        mixed = jnp.einsum("nhqk,nkhd->nqhd", nnx.softmax(scores), v)
        return self.out(mixed.reshape(x.shape))


class Block(nnx.Module):
    """An attention in windows and a feed-forward network."""

    def __init__(
        self,
        width: int,
        heads: int,
        size: int,
        window: int,
        shift: int,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        self.norm1 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.attention = WindowAttention(width, heads, window, dtype=dtype, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)
        self.size, self.window, self.shift = size, window, shift

    def __call__(self, x: jax.Array) -> jax.Array:
        shift, axes = self.shift, (1, 2)
        y = self.norm1(x)
        y = jnp.roll(y, (-shift, -shift), axes) if shift else y
        mask = shift_mask(self.size, self.window, shift) if shift else None
        y = joined(self.attention(windows(y, self.window), mask), self.window, self.size)
        x += jnp.roll(y, (shift, shift), axes) if shift else y
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Merge(nnx.Module):
    """Four pixels become one of twice the features."""

    def __init__(self, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(4 * width, dtype=dtype, rngs=rngs)
        self.reduce = nnx.Linear(4 * width, 2 * width, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        parts = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        return self.reduce(self.norm(jnp.concatenate(parts, axis=-1)))


class Swin(nnx.Module):
    """The network."""

    def __init__(
        self,
        width: int = 96,
        depths: tuple[int, ...] = (2, 2, 6, 2),
        heads: tuple[int, ...] = (3, 6, 12, 24),
        *,
        image: int = 224,
        window: int = 7,
        classes: int = 1000,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        options: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        self.patches = nnx.Conv(3, width, (4, 4), 4, padding="VALID", **options)
        self.norm = nnx.LayerNorm(width, **options)
        self.blocks: Any = nnx.List([])
        size = image // 4
        for stage, (depth, count) in enumerate(zip(depths, heads, strict=True)):
            if stage:
                self.blocks.append(Merge(width, **options))
                width, size = 2 * width, size // 2
            block = functools.partial(Block, width, count, size, window, **options)
            shifts = (0, window // 2 if size > window else 0)
            self.blocks.extend([block(shift=shifts[i % 2]) for i in range(depth)])
        self.last = nnx.LayerNorm(width, **options)
        self.head = nnx.Linear(width, classes, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.norm(self.patches(x))
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x).mean(axis=(1, 2)))
