"""TPU kernel for weight gradients of products whose left operand is stored by `BlockSparse`."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu
from jaxtyping import Array, Float

from jaxcomp._core import barriers, platforms
from jaxcomp._core.shard_map import match_varying, struct_like
from jaxcomp.codecs import BlockSparse, Encoded
from jaxcomp.codecs._block_sparse import Grid

LANES, SUBLANES = 128, 8  # of a 32-bit vector register
VMEM_NBYTES = 12 * 2**20  # in bytes; XLA gives a kernel 16 MiB


def by_tpu(
    codec: BlockSparse,
    code: Encoded,
    cotangent: Float[Array, "batch ... columns"],
    precision: lax.PrecisionLike = None,
) -> Float[Array, "features columns"]:
    """Multiplies the kept blocks as `by_rows` does, and sums the products on the chip.

    The kernel reads the cotangent once, and the blocks once for each tile of columns. Only kept
    blocks are multiplied. The only array it writes is the gradient. On other platforms Pallas
    interprets the kernel, which is for tests. `refusal` must return None for the blocks. A sharded
    batch needs `jax.shard_map`.

    Args:
        codec: Codec of the left operand.
        code: The encoded left operand, of shape (batch, ..., features).
        cotangent: Cotangent of the product.
        precision: Precision of the product.

    Returns:
        The weight gradient in float32.

    Raises:
        NotImplementedError: When the result is differentiated.
    """
    cotangent = barriers.undifferentiable(cotangent)  # Pallas cannot differentiate a kernel
    grid = codec.grid(code.shape)
    (tall, wide), batch, columns = grid.block, code.shape[0], cotangent.shape[-1]
    if not code.arrays[0].size:
        return jnp.zeros((grid.width, columns), jnp.float32)
    data = codec.data(code).reshape(batch, grid.rows, grid.kept, tall, wide)
    data = data.swapaxes(2, 3).reshape(batch, grid.rows, tall, grid.kept * wide)
    g = grid.rows_of_blocks(cotangent)
    indices = code.arrays[0].reshape(batch, grid.rows, 1, grid.kept).astype(jnp.int32)
    features = grid.columns * wide

    tile = min(columns, max(1, VMEM_NBYTES // _nbytes(grid)) * LANES)
    zero = np.int32(0)  # Mosaic does not support 64-bit integers

    def run(interpret: bool, *args: Array) -> Array:
        return pl.pallas_call(
            functools.partial(_kernel, grid, precision),
            grid=(-(-columns // tile), batch, grid.rows),
            in_specs=[
                pl.BlockSpec(
                    (None, None, 1, grid.kept),
                    lambda j, b, r: (b, r, zero, zero),
                    memory_space=tpu.SMEM,
                ),
                pl.BlockSpec(
                    (None, None, tall, grid.kept * wide), lambda j, b, r: (b, r, zero, zero)
                ),
                pl.BlockSpec((None, None, tall, tile), lambda j, b, r: (b, r, zero, j)),
            ],
            out_specs=pl.BlockSpec((features, tile), lambda j, b, r: (zero, j)),
            out_shape=struct_like(args[0], (features, columns), jnp.float32),
            interpret=interpret,
            name="block_product",
        )(*args)

    dtype = jnp.promote_types(data.dtype, g.dtype)
    sums = platforms.interpret_but_on_tpu(
        match_varying((indices, data.astype(dtype), g.astype(dtype))), run
    )
    return sums[: grid.width]


def refusal(codec: BlockSparse, shape: tuple[int, ...]) -> str | None:
    """Returns why the kernel does not support blocks of this size, or None if it does."""
    block, nbytes = codec.grid(shape).block, _nbytes(codec.grid(shape))
    if block[1] % SUBLANES:
        return (
            f"expected blocks whose width is a multiple of {SUBLANES}, got {block} for x of shape "
            f"{shape}"
        )
    if nbytes > VMEM_NBYTES:
        return (
            f"x of shape {shape} needs {nbytes} bytes on the chip, expected at most {VMEM_NBYTES}; "
            "use 'dense'"
        )
    return None


def _nbytes(grid: Grid) -> int:
    """Returns the bytes of VMEM for a tile of LANES columns, with the buffers of copies."""
    (tall, wide), kept = grid.block, grid.kept * grid.block[1]
    sums, products, data = grid.columns * wide * LANES, kept * LANES, tall * (kept + LANES)
    return 4 * (2 * sums + products + 2 * data)


def _kernel(
    grid: Grid,
    precision: lax.PrecisionLike,
    indices: Any,
    data: Any,
    cotangent: Any,
    out: Any,
) -> None:
    """Adds the products of one row of blocks to a tile of the gradient, which stays in VMEM."""

    @pl.when((pl.program_id(1) == 0) & (pl.program_id(2) == 0))
    def _() -> None:
        out[...] = jnp.zeros_like(out)

    over_tokens = ((0,), (0,)), ((), ())
    products = lax.dot_general(
        data[...], cotangent[...], over_tokens, precision, preferred_element_type=jnp.float32
    )
    wide = grid.block[1]
    for i in range(grid.kept):
        at = pl.ds(pl.multiple_of(indices[0, i] * wide, wide), wide)
        out[at, :] += products[i * wide : (i + 1) * wide]
