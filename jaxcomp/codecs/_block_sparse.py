"""Block-sparse storage: keeps the largest blocks of each sample's activations, or a sample."""

import dataclasses
import math
from typing import ClassVar, Literal, NamedTuple, cast, get_args

import jax
import jax.numpy as jnp
from jax.experimental import sparse
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer

from jaxcomp._core.integers import as_integer
from jaxcomp.codecs import noise
from jaxcomp.codecs._codec import Codec, Encoded, Exact, Seed, array_nbytes
from jaxcomp.codecs._offload import inner_codec

Block = int | tuple[int, int]
Product = Literal["auto", "dense", "rows", "tpu"]
_EXACT = Exact()
_LEAST = 1e-6  # weight of a block of zeros beside that of the largest


class Grid(NamedTuple):
    """Partition of one sample's matrix into blocks.

    Attributes:
        rows: Number of rows of blocks.
        columns: Number of columns of blocks.
        kept: Number of blocks that are kept in each row of blocks.
        block: Height (tokens) and width (features) of a block, in elements.
        height: Height of the matrix in elements, without padding.
        width: Width of the matrix in elements, without padding.
    """

    rows: int
    columns: int
    kept: int
    block: tuple[int, int]
    height: int
    width: int

    def rows_of_blocks(
        self, x: Float[Array, "batch ... columns"]
    ) -> Float[Array, "batch rows tall columns"]:
        """Splits the tokens into rows of blocks; the last row is padded with zeros.

        Args:
            x: Array with `height` tokens in each sample and any number of columns.

        Returns:
            Array of shape (batch, rows, block height, columns).
        """
        batch, *_, columns = x.shape
        x = x.reshape(batch, self.height, columns)
        x = jnp.pad(x, ((0, 0), (0, self.rows * self.block[0] - self.height), (0, 0)))
        return x.reshape(batch, self.rows, self.block[0], columns)


@dataclasses.dataclass(frozen=True)
class BlockSparse(Codec):
    """Stores some blocks of each sample's matrix; all others decode to zero. Biased by default.

    The matrix of a sample has one row for each token (all axes between the batch axis and the last
    axis) and one column for each feature. Each row of blocks keeps the same number of blocks, so
    shapes are static. Samples that are sharded over devices need no communication. Kept blocks are
    stored by `values`, exactly by default. By default the largest blocks are kept. Dropped blocks
    are missing from the weight gradient, in every step in the same way.

    With `sampled`, blocks are drawn at random, and divided by the probability with which they are
    kept, so the decoded value is unbiased. The probability is proportional to a block's magnitude,
    and 1 for the largest. A systematic sample draws the same number of blocks in each row, with
    these probabilities. The divided values are rounded to the array's dtype; beyond its largest
    number they become Inf.

    Blocks are ranked by the sum of their magnitudes. The page on pruned activations compares this
    with the sum of squares: its gradients were at least as close to the exact ones. Among equal
    blocks, the first are kept. Blocks at the far edges are padded with zeros; the padding counts as
    stored bytes. A matrix that is lower than a block has blocks of its own height, so an array of
    two axes has blocks of one row. A block with a NaN or Inf ranks first. It is dropped only if
    more blocks of its row have one than are kept.

    Source: Barley and Fröning, "Compressing the Backward Pass of Large-Scale Neural Architectures
    by Structured Activation Pruning" (arXiv:2311.16883). There, the number of kept blocks is not
    fixed for each row. Sampling: in blocks, what WTA-CRS does for rows (Liu et al., NeurIPS 2023,
    arXiv:2305.15265, section 3.2). Systematic sample: Madow 1949.

    Attributes:
        block: Height (tokens) and width (features) of a block in elements; one integer means a
            square.
        density: Fraction of the blocks in a row that is kept, more than 0 and at most 1. The number
            of kept blocks is rounded up.
        values: Codec for the values of the kept blocks.
        product: How a linear layer computes its weight gradient from the kept blocks. "dense"
            multiplies the decoded matrix. "rows" multiplies the kept blocks alone, for each row of
            blocks. "tpu" is a TPU kernel that sums the products of "rows" on the chip, for one
            device or the inside of `jax.shard_map`; the width of a block must be a multiple of 8.
            "auto" is the TPU kernel on one TPU if it supports the blocks; otherwise "rows" if its
            products take less memory than the decoded matrix; otherwise "dense".
        sampled: Whether blocks are drawn at random, without bias.

    Raises:
        TypeError: If `values` is not a codec, or `sampled` is not a bool.
        ValueError: If another attribute is invalid. On encoding: if the array has fewer than two
            axes, or if the encoded array would not be smaller.

    Example:
        >>> codec = BlockSparse(block=8, density=0.25)
        >>> codec.nbytes((2, 64, 64), jnp.bfloat16)  # 2 * 8 * 2 blocks of 128 bytes, and 1 each
        4128
        >>> codec = BlockSparse(block=(1, 2), density=0.5)
        >>> codec.decode(codec.encode(jnp.array([[1.0, 1.0, 0.0, -3.0]]))).tolist()
        [[0.0, 0.0, 0.0, -3.0]]
    """

    block: Block = 8
    density: float = 0.25
    values: Codec = _EXACT
    product: Product = "auto"
    sampled: bool = False
    name: ClassVar[str] = "block_sparse"
    kinds = ("conv", "dot", "affine")

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        """Whether blocks are drawn at random, and their values stored without bias."""
        return self.sampled and self.values.unbiased

    def __post_init__(self) -> None:
        given = self.block if isinstance(self.block, tuple) else (self.block, self.block)
        sides = tuple(map(as_integer, given))
        if len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides):
            raise ValueError(f"block={self.block!r}: expected a positive integer, or two of them")
        if isinstance(self.density, bool) or not 0 < self.density <= 1:
            raise ValueError(f"density={self.density!r}: expected more than 0 and at most 1")
        if not isinstance(self.values, Codec):
            raise TypeError(f"values={self.values!r}: expected a codec such as Quantize(bits=4)")
        if self.product not in get_args(Product):
            raise ValueError(f"product={self.product!r}: expected one of {get_args(Product)}")
        if not isinstance(self.sampled, bool):
            raise TypeError(f"sampled={self.sampled!r}: expected True or False")
        object.__setattr__(self, "block", sides)

    def check(self, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        """Checks that an array can be stored in fewer bytes than its own.

        Args:
            shape: Shape of the array, (batch, ..., features).
            dtype: Dtype of the array.

        Raises:
            TypeError: If `dtype` is not float32, bfloat16 or float16.
            ValueError: If the array has fewer than two axes, or the encoded array would not be
                smaller.
        """
        super().check(shape, dtype)
        if len(shape) < 2:
            raise ValueError(f"BlockSparse needs shape (batch, ..., features); got {shape}")
        self.values.check(self.data_shape(shape), dtype)
        dense, stored = array_nbytes(shape, dtype), self._nbytes(shape, dtype)
        if dense and stored >= dense:
            raise ValueError(
                f"{self}: would store x of shape {shape} in {stored} bytes, and it has {dense}; "
                "expected a lower density, or blocks that fit it better"
            )

    def grid(self, shape: tuple[int, ...]) -> Grid:
        """Returns the partition of one sample's matrix, for an array of this shape."""
        tall, wide = cast(tuple[int, int], self.block)
        height, width = math.prod(shape[1:-1]), shape[-1]
        block = max(1, min(tall, height)), max(1, min(wide, width))
        rows, columns = -(-height // block[0]), -(-width // block[1])
        kept = math.ceil(round(self.density * columns, 6))  # 0.1 * 30 > 3 in floats
        return Grid(rows, columns, kept, block, height, width)

    def data_shape(self, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Returns the shape of the kept values, (batch, blocks of a sample, height, width)."""
        grid = self.grid(shape)
        return (shape[0], grid.rows * grid.kept, *grid.block)

    def to_bcsr(self, encoded: Encoded) -> sparse.BCSR:
        """Converts an encoded array to JAX's block-sparse format; no dense matrix is computed.

        Args:
            encoded: Result of `encode`. Its first array holds the column indices; the other arrays
                hold the kept values as `values` stores them. The row pointers are the same for each
                sample.

        Returns:
            Matrices of shape (batch, rows of blocks, columns of blocks, height, width), with one
            batch axis and two dense axes. They are padded where blocks do not fit the array.

        Example:
            >>> codec = BlockSparse(block=8, density=0.25)
            >>> codec.to_bcsr(codec.encode(jnp.ones((2, 16, 32)))).shape
            (2, 2, 4, 8, 8)
        """
        self._check_code(encoded)
        grid = self.grid(encoded.shape)
        indices = encoded.arrays[0]
        pointers = jnp.arange(grid.rows + 1, dtype=_index_dtype(grid.rows * grid.kept + 1))
        pointers = jnp.broadcast_to(grid.kept * pointers, (encoded.shape[0], grid.rows + 1))
        return sparse.BCSR(
            (self.data(encoded), indices, pointers),
            shape=(encoded.shape[0], grid.rows, grid.columns, *grid.block),
            indices_sorted=True,
            unique_indices=True,
        )

    def data(self, encoded: Encoded) -> Array:
        """Returns the values of the kept blocks, row by row: (batch, blocks, height, width)."""
        self._check_code(encoded)
        arrays, shape = encoded.arrays[1:], self.data_shape(encoded.shape)
        return self.values.decode(Encoded(arrays, shape, encoded.dtype, inner_codec(self.values)))

    def slots(self, encoded: Encoded) -> Integer[Array, "batch rows columns"]:
        """Returns the position of each block among the kept blocks of its row.

        Args:
            encoded: Result of `encode`.

        Returns:
            Array of shape (batch, rows of blocks, columns of blocks). Positions count from 1; 0
            means that the block was dropped.
        """
        self._check_code(encoded)
        grid = self.grid(encoded.shape)
        indices = encoded.arrays[0].reshape(encoded.shape[0], grid.rows, grid.kept, 1)
        here = indices == jnp.arange(grid.columns, dtype=indices.dtype).reshape(1, 1, 1, -1)
        dtype = _index_dtype(grid.kept + 1)
        count = jnp.arange(1, grid.kept + 1, dtype=dtype).reshape(1, 1, -1, 1)
        return jnp.where(here, count, jnp.zeros_like(count)).sum(2, dtype=dtype)

    def _nbytes(self, shape: tuple[int, ...], dtype: DTypeLike) -> int:
        *blocks, _, _ = data = self.data_shape(shape)
        indices = array_nbytes(tuple(blocks), _index_dtype(self.grid(shape).columns))
        return indices + self.values.nbytes(data, dtype)

    def _encode(self, x: Array, seed: Seed) -> tuple[Array, ...]:
        grid = self.grid(x.shape)
        (tall, wide), batch = grid.block, x.shape[0]
        x = x.reshape(batch, grid.height, grid.width)
        missing = grid.rows * tall - grid.height, grid.columns * wide - grid.width
        x = jnp.pad(x, ((0, 0), (0, missing[0]), (0, missing[1])))
        x = x.reshape(batch, grid.rows, tall, grid.columns, wide)
        sizes = _sizes(x.astype(jnp.float32))
        sizes = jnp.where(jnp.isnan(sizes), jnp.inf, sizes)
        if self.sampled:
            chances = _chances(sizes, grid.kept)
            chosen = _systematic(
                chances, grid.kept, noise.uniform(sizes[..., 0], noise.folded(seed, 1))
            )
        else:
            # `lax.top_k` would gather an array that is sharded over devices.
            order = jnp.argsort(-sizes, axis=-1, stable=True)
            chosen = jnp.sort(order[..., : grid.kept], axis=-1)
        data = jax.vmap(jax.vmap(lambda row, i: row[:, i]))(x, chosen).swapaxes(2, 3)
        if self.sampled:
            chance = jnp.take_along_axis(chances, chosen, axis=-1)[..., None, None]
            data = (data.astype(jnp.float32) / chance).astype(x.dtype)
        data = data.reshape(batch, grid.rows * grid.kept, tall, wide)
        indices = chosen.reshape(data.shape[:2]).astype(_index_dtype(grid.columns))
        return indices, *self.values.encode(data, seed).arrays

    def _decode(self, arrays: tuple[Array, ...], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        encoded = Encoded(arrays, shape, jnp.dtype(dtype), self)
        grid = self.grid(shape)
        (tall, wide), batch = grid.block, shape[0]
        data = self.data(encoded).reshape(batch, grid.rows, grid.kept, tall, wide)
        slots = self.slots(encoded)
        blocks = jax.vmap(jax.vmap(lambda row, i: row[i]))(data, jnp.maximum(slots, 1) - 1)
        blocks = jnp.where((slots > 0)[..., None, None], blocks, jnp.zeros((), dtype))
        x = blocks.swapaxes(2, 3).reshape(batch, grid.rows * tall, grid.columns * wide)
        return x[:, : grid.height, : grid.width].reshape(shape)


def _sizes(blocks: Array) -> Array:
    """Returns each block's sum of magnitudes; axes (batch, rows, height, columns, width)."""
    return jnp.abs(blocks).sum((2, 4))


def _chances(sizes: Array, kept: int) -> Array:
    """Returns the probability of each block of a row: they are proportional to sizes, up to 1.

    Args:
        sizes: Sizes of the blocks along the last axis; not negative.
        kept: The sum of the probabilities.
    """
    if kept == sizes.shape[-1]:
        return jnp.ones_like(sizes)
    finite = jnp.where(jnp.isfinite(sizes), sizes, 0)
    largest = jnp.max(finite, axis=-1, keepdims=True)
    # A block of zeros has a small chance, too, so that each row has enough blocks.
    weights = finite / jnp.where(largest > 0, largest, 1) + _LEAST
    weights = jnp.where(jnp.isfinite(sizes), weights, 1 / _LEAST)
    descending = -jnp.sort(-weights, axis=-1)
    rest = jnp.flip(jnp.cumsum(jnp.flip(descending, -1), axis=-1), -1)[..., : kept + 1]
    # If so many of the largest have the probability 1, the others share what is left.
    factors = (kept - _count(rest)) / rest
    certain = jnp.argmax(factors * descending[..., : kept + 1] <= 1, axis=-1, keepdims=True)
    return jnp.minimum(weights * jnp.take_along_axis(factors, certain, axis=-1), 1)


def _systematic(chances: Array, kept: int, start: Array) -> Array:
    """Draws blocks with given probabilities, the same number in each row.

    The probabilities lie one behind the other on a line. A block is drawn if one of the points
    `start`, `start + 1`, ... lies in its part of the line.

    Args:
        chances: Probabilities along the last axis, none above 1; their sum is `kept`.
        kept: Number of blocks to draw.
        start: A random number in (0, 1) for each row.

    Returns:
        Ascending indices of the drawn blocks.
    """
    ends = jnp.cumsum(chances, axis=-1)
    ends *= kept / ends[..., -1:]
    points = jnp.broadcast_to(start[..., None], (*start.shape, kept))
    points += _count(points)
    index = (ends[..., None, :] <= points[..., None]).sum(-1)
    # By the rounding of sums two points may lie in one part.
    count = _count(index)
    index = jax.lax.cummax(index - count, axis=index.ndim - 1) + count
    return jnp.minimum(index, chances.shape[-1] - kept + count)


def _count(like: Array) -> Array:
    """Returns 0, 1, 2, ... along the last axis of an array of this shape, as int32."""
    return jax.lax.broadcasted_iota(jnp.int32, like.shape, like.ndim - 1)


def _index_dtype(count: int) -> jnp.dtype:
    """Returns the narrowest integer dtype that holds indices below `count`."""
    dtypes = map(jnp.dtype, ("uint8", "int16", "int32"))
    return next(dtype for dtype in dtypes if count <= jnp.iinfo(dtype).max + 1)
