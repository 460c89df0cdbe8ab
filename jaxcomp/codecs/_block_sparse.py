"""The blocks of largest magnitude of a matrix of activations, and where they were."""

import dataclasses
import math
import typing

import jax
import jax.numpy as jnp
from jax.experimental import sparse
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer

from jaxcomp.codecs._codec import Codec, Encoded, Exact, Seed, array_nbytes

Block = int | tuple[int, int]
Product = typing.Literal["auto", "dense", "rows", "triton", "tpu"]
_EXACT = Exact()


class Grid(typing.NamedTuple):
    """How the matrix of a sample is cut.

    Attributes:
        rows: Rows of blocks.
        columns: Columns of blocks.
        kept: Blocks that are kept in each row.
        block: Height and width of a block.
        height: Height of the matrix, without padding.
        width: Its width.
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
        """The tokens of a matrix of as many as this one, by row of blocks, filled up with zeros."""
        batch, *_, columns = x.shape
        x = x.reshape(batch, self.height, columns)
        x = jnp.pad(x, ((0, 0), (0, self.rows * self.block[0] - self.height), (0, 0)))
        return x.reshape(batch, self.rows, self.block[0], columns)


@dataclasses.dataclass(frozen=True)
class BlockSparse(Codec):
    """Biased: stores the largest blocks of each sample's matrix; the others become zero.

    The matrix of a sample has a row for each token (all axes between the first, the batch, and the
    last) and a column for each feature. Each row of blocks keeps the same number, so shapes are
    static, and samples sharded over devices need no communication. Kept blocks come back as
    `values` stores them, exactly by default. What is dropped is missing from the weight's gradient,
    step for step in the same way.

    Blocks are ranked by their sum of magnitudes, which was at least as near to the exact gradient
    as the sum of squares (docs/pruning.md). Of equal blocks the first are kept. At the far edges a
    block that does not fit is filled up with zeros, which count among the stored bytes; a matrix
    that is lower than a block has blocks of its own height, so an array of two axes has blocks of
    one row. A block with a NaN or Inf comes before all others: it is dropped only if more than are
    kept in its row have one, too.

    Barley and Fröning, "Compressing the Backward Pass of Large-Scale Neural Architectures by
    Structured Activation Pruning" (arXiv:2311.16883), whose number of blocks is not per row.

    Attributes:
        block: Height (tokens) and width (features) of a block; one number means a square.
        density: Part of the blocks in a row that is kept, rounded up to whole blocks; more than 0
            and at most 1.
        values: How the values of kept blocks are stored.
        product: How a linear layer makes its weight's gradient of them: "dense", of the decoded
            matrix; "rows", a product for each row of blocks, of the kept ones alone; "triton", a
            kernel for CUDA that decodes on the chip, for blocks whose sides are powers of two;
            "tpu", a kernel for TPUs that adds up the products of "rows" on the chip, for blocks
            whose width is a multiple of 8 (both for one device, or inside `jax.shard_map`);
            "auto", for one TPU its kernel where that knows the blocks, else "rows" where they take
            less memory than the decoded matrix, else "dense".

    Raises:
        TypeError: If `values` is not a codec.
        ValueError: If an attribute is none of these; on encoding, if the array has fewer than two
            axes, or its code would not be smaller.

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
    name: typing.ClassVar[str] = "block_sparse"
    kinds = ("conv", "dot", "affine")
    unbiased = False

    def __post_init__(self) -> None:
        sides = self.block if isinstance(self.block, tuple) else (self.block, self.block)
        if len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides):
            raise ValueError(f"block={self.block!r}: expected a positive integer, or two of them")
        if isinstance(self.density, bool) or not 0 < self.density <= 1:
            raise ValueError(f"density={self.density!r}: expected more than 0 and at most 1")
        if not isinstance(self.values, Codec):
            raise TypeError(f"values={self.values!r}: expected a codec such as Quantize(bits=4)")
        if self.product not in typing.get_args(Product):
            raise ValueError(
                f"product={self.product!r}: expected one of {typing.get_args(Product)}"
            )
        object.__setattr__(self, "block", sides)

    def check(self, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        """Raises an error if an array cannot be stored, or not in fewer bytes."""
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
        """How the matrix of a sample of an array of this shape is cut."""
        tall, wide = typing.cast(tuple[int, int], self.block)
        height, width = math.prod(shape[1:-1]), shape[-1]
        block = max(1, min(tall, height)), max(1, min(wide, width))
        rows, columns = -(-height // block[0]), -(-width // block[1])
        kept = math.ceil(round(self.density * columns, 6))  # 0.1 * 30 is more than 3
        return Grid(rows, columns, kept, block, height, width)

    def data_shape(self, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Shape of the values that are kept of an array of this shape."""
        grid = self.grid(shape)
        return (shape[0], grid.rows * grid.kept, *grid.block)

    def to_bcsr(self, encoded: Encoded) -> sparse.BCSR:
        """The code as JAX's own block-sparse matrices; nothing is made dense.

        Args:
            encoded: What `encode` returned. Its first array are the column indices, the others hold
                the data as `values` stores it; row pointers are the same for each sample.

        Returns:
            Of shape (batch, rows of blocks, columns of blocks, height, width), with one batch axis
            and two dense ones; padded where blocks do not fit the array.

        Example:
            >>> codec = BlockSparse(block=8, density=0.25)
            >>> codec.to_bcsr(codec.encode(jnp.ones((2, 16, 32)))).shape
            (2, 2, 4, 8, 8)
        """
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
        """The values of kept blocks, (batch, blocks, height, width), row of blocks after row."""
        shape = self.data_shape(encoded.shape)
        return self.values.decode(Encoded(encoded.arrays[1:], shape, encoded.dtype))

    def slots(self, encoded: Encoded) -> Integer[Array, "batch rows columns"]:
        """Which of its row's kept blocks each block is, counted from 1; 0 if it is dropped."""
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
        # `lax.top_k` would gather what is spread over devices.
        order = jnp.argsort(-sizes, axis=-1, stable=True)
        chosen = jnp.sort(order[..., : grid.kept], axis=-1)
        data = jax.vmap(jax.vmap(lambda row, i: row[:, i]))(x, chosen).swapaxes(2, 3)
        data = data.reshape(batch, grid.rows * grid.kept, tall, wide)
        indices = chosen.reshape(data.shape[:2]).astype(_index_dtype(grid.columns))
        return indices, *self.values.encode(data, seed).arrays

    def _decode(self, arrays: tuple[Array, ...], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        encoded = Encoded(arrays, shape, jnp.dtype(dtype))
        grid = self.grid(shape)
        (tall, wide), batch = grid.block, shape[0]
        data = self.data(encoded).reshape(batch, grid.rows, grid.kept, tall, wide)
        slots = self.slots(encoded)
        blocks = jax.vmap(jax.vmap(lambda row, i: row[i]))(data, jnp.maximum(slots, 1) - 1)
        blocks = jnp.where((slots > 0)[..., None, None], blocks, jnp.zeros((), dtype))
        x = blocks.swapaxes(2, 3).reshape(batch, grid.rows * tall, grid.columns * wide)
        return x[:, : grid.height, : grid.width].reshape(shape)


def _sizes(blocks: Array) -> Array:
    """What blocks of shape (batch, rows, height, columns, width) are ranked by."""
    return jnp.abs(blocks).sum((2, 4))


def _index_dtype(count: int) -> jnp.dtype:
    """The narrowest dtype for indices below `count`."""
    dtypes = map(jnp.dtype, ("uint8", "int16", "int32"))
    return next(dtype for dtype in dtypes if count <= jnp.iinfo(dtype).max + 1)
