"""CUDA kernel for weight gradients of products whose left operand is stored by `BlockSparse`."""

import functools
import math
import typing

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Integer

from jaxcomp._core import barriers, platforms
from jaxcomp._core.shard_map import match_varying, struct_like
from jaxcomp.codecs import BlockSparse, Encoded
from jaxcomp.codecs._block_sparse import Grid

TILE = 64, 64, 64  # rows, features and columns that one step of the kernel reads
PROGRAMS = 512  # least number of programs, to occupy a large GPU


def by_triton(
    codec: BlockSparse,
    code: Encoded,
    cotangent: Float[Array, "batch ... columns"],
    precision: lax.PrecisionLike = None,
) -> Float[Array, "features columns"]:
    """Reads the kept blocks and decodes them to tiles in registers, which it multiplies.

    The kernel reads fewer bytes than the dense product, but also multiplies zeros. On other
    platforms Pallas interprets it, which is for tests. `refusal` must return None for the blocks. A
    sharded batch is gathered, except inside of `jax.shard_map`.

    Args:
        codec: Codec of the left operand.
        code: The encoded left operand, of shape (batch, ..., features).
        cotangent: Cotangent of the product.
        precision: Precision of the product.

    Returns:
        The weight gradient in float32.

    Raises:
        NotImplementedError: When the result is differentiated.
        ValueError: If an array has 2^31 or more elements.
    """
    cotangent = barriers.undifferentiable(cotangent)  # Pallas cannot differentiate a kernel
    grid = codec.grid(code.shape)
    batch, columns = code.shape[0], cotangent.shape[-1]
    data, slots = codec.data(code), codec.slots(code).astype(jnp.int32)
    if max(data.size, cotangent.size, slots.size) >= 2**31:
        raise ValueError(f"product='triton': x of shape {code.shape} is too large; use 'dense'")
    if not code.arrays[0].size:
        return jnp.zeros((grid.width, columns), jnp.float32)
    rows, features, width = TILE
    tiles = -(-grid.width // features), -(-columns // width)
    steps = -(-batch * grid.rows * grid.block[0] // rows)
    parts = min(steps, -(-PROGRAMS // math.prod(tiles)))
    steps = -(-steps // parts)

    def run(interpret: bool, *args: Array) -> Array:
        sums = pl.pallas_call(
            functools.partial(_kernel, grid, batch * grid.rows, columns, steps, precision),
            grid=(*tiles, parts),
            out_shape=struct_like(
                args[0], (parts, tiles[0] * features, tiles[1] * width), jnp.float32
            ),
            out_specs=pl.BlockSpec((None, features, width), lambda i, j, part: (part, i, j)),
            compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
            interpret=interpret,
            name="block_product",
        )(*args)
        return sums.sum(0)[: grid.width, :columns]

    dtype = jnp.promote_types(data.dtype, cotangent.dtype)
    return platforms.kernel_or_interpreter(
        "cuda",
        match_varying(
            tuple(a.reshape(-1) for a in (slots, data.astype(dtype), cotangent.astype(dtype)))
        ),
        run,
    )


def refusal(codec: BlockSparse, shape: tuple[int, ...]) -> str | None:
    """Returns why the kernel does not support blocks of this size, or None if it does."""
    block = codec.grid(shape).block
    if any(side & (side - 1) for side in block):
        return f"expected block sides that are powers of two, got {block} for x of shape {shape}"
    return None


def _kernel(
    grid: Grid,
    block_rows: int,
    columns: int,
    steps: int,
    precision: lax.PrecisionLike,
    slots: typing.Any,
    data: typing.Any,
    cotangent: typing.Any,
    out: typing.Any,
) -> None:
    """Computes a tile of the gradient, summed over a part of the rows."""
    rows, features, width = TILE
    tall, wide = grid.block
    feature = pl.program_id(0) * features + jnp.arange(features)
    column = pl.program_id(1) * width + jnp.arange(width)
    first = pl.program_id(2) * steps

    def step(i: Integer[Array, ""], total: Array) -> Array:
        row = (first + i) * rows + jnp.arange(rows)
        block_row = row // tall
        there = block_row < block_rows
        token = block_row % grid.rows * tall + row % tall
        kept = there[None, :] & (feature < grid.width)[:, None]
        at = (block_row * grid.columns)[None, :] + (feature // wide)[:, None]
        slot = triton.load(slots.at[at], mask=kept, other=0)
        block = (block_row * grid.kept)[None, :] + slot - 1
        at = (block * tall + (row % tall)[None, :]) * wide + (feature % wide)[:, None]
        x = triton.load(data.at[at], mask=slot > 0, other=0.0)
        there = there & (token < grid.height)
        at = (block_row // grid.rows * grid.height + token) * columns
        at = at[:, None] + column[None, :]
        g = triton.load(
            cotangent.at[at], mask=there[:, None] & (column < columns)[None, :], other=0.0
        )
        return total + jnp.dot(x, g, precision=precision, preferred_element_type=jnp.float32)

    out[...] = lax.fori_loop(0, steps, step, jnp.zeros((features, width), jnp.float32))
