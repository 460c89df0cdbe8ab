"""Weight gradients of products whose left operand is stored in blocks, which stays as it is."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxcomp.codecs import BlockSparse, Encoded
from jaxcomp.codecs.block_sparse import Product
from jaxcomp.ops import block_tpu, block_triton

_KERNELS = {"triton": block_triton, "tpu": block_tpu}


def choose(codec: BlockSparse, shape: tuple[int, ...], columns: int, itemsize: int) -> Product:
    """How `codec.product` says that a weight's gradient is made; "auto" is decided by bytes.

    The products of rows of blocks take less memory than the dense matrix where blocks are tall:
    with an `itemsize` of 2 bytes, more than `2 * density * columns` rows.

    Args:
        codec: Of the product's left operand.
        shape: Shape of that.
        columns: Columns of the weight.
        itemsize: Bytes of an element.

    Example:
        >>> codec = BlockSparse(block=(196, 8), density=0.25)
        >>> choose(codec, (128, 196, 384), 384, 2), choose(codec, (128, 196, 384), 1536, 2)
        ('rows', 'dense')
    """
    if codec.product != "auto":
        return codec.product
    grid = codec.grid(shape)
    sums = grid.rows * grid.kept * grid.block[1] * columns * 4
    return "rows" if sums < grid.height * grid.width * itemsize else "dense"


def by_rows(
    codec: BlockSparse,
    code: Encoded,
    cotangent: Float[Array, "batch ... columns"],
    precision: lax.PrecisionLike = None,
) -> Float[Array, "features columns"]:
    """Multiplies each row of blocks by its part of the cotangent, and adds up by feature.

    FLOPs are those of the kept blocks alone. Not made: the dense matrix, nor copies of the
    cotangent; what is made has `kept * width * columns` float32 numbers for each row of blocks.
    """
    grid = codec.grid(code.shape)
    (tall, wide), batch, columns = grid.block, code.shape[0], cotangent.shape[-1]
    data = codec.data(code).reshape(batch, grid.rows, grid.kept, tall, wide)
    g = cotangent.reshape(batch, grid.height, columns)
    g = jnp.pad(g, ((0, 0), (0, grid.rows * tall - grid.height), (0, 0)))
    g = g.reshape(batch, grid.rows, tall, columns)
    dtype = jnp.promote_types(data.dtype, g.dtype)
    products = jnp.einsum(
        "brktw,brtn->brkwn",
        data.astype(dtype),
        g.astype(dtype),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    products = products.reshape(-1, wide, columns)
    indices = code.arrays[0].reshape(-1).astype(jnp.int32)
    sums = jax.ops.segment_sum(products, indices, grid.columns)
    return sums.reshape(-1, columns)[: grid.width]


GRADIENTS = {"rows": by_rows, "triton": block_triton.by_triton, "tpu": block_tpu.by_tpu}
"""How each product but "dense" makes the weight's gradient of the code and the cotangent."""


def check(codec: BlockSparse, shape: tuple[int, ...], product: Product) -> None:
    """Raises a ValueError if a kernel does not know blocks of this size."""
    if product in _KERNELS:
        _KERNELS[product].check(codec, shape)
