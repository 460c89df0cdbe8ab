"""Weight gradients of matrix products whose left operand is stored by `BlockSparse`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxcomp._core.one_device import on_one
from jaxcomp.codecs import BlockSparse, Codec, Encoded
from jaxcomp.codecs._block_sparse import Product
from jaxcomp.ops import _block_tpu as block_tpu


def by_dense(
    codec: Codec,
    code: Encoded,
    cotangent: Float[Array, "batch ... columns"],
    precision: lax.PrecisionLike = None,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "features columns"]:
    """Decodes the left operand and multiplies.

    Args:
        codec: Codec of the left operand; any codec.
        code: The encoded left operand, of shape (batch, ..., features).
        cotangent: Cotangent of the product.
        precision: Precision of the product.
        dtype: Dtype of the sums.

    Returns:
        The weight gradient.
    """
    rows = tuple(range(len(code.shape) - 1))
    return jnp.tensordot(
        codec.decode(code),
        cotangent,
        (rows, rows),
        precision=precision,
        preferred_element_type=dtype,
    )


def by_rows(
    codec: BlockSparse,
    code: Encoded,
    cotangent: Float[Array, "batch ... columns"],
    precision: lax.PrecisionLike = None,
) -> Float[Array, "features columns"]:
    """Multiplies the kept blocks of each row of blocks by their part of the cotangent.

    Only kept blocks cost FLOPs. Neither the dense matrix nor a copy of the cotangent is computed.
    The products take `kept * width * columns` float32 numbers for each row of blocks.

    Args:
        codec: Codec of the left operand.
        code: The encoded left operand, of shape (batch, ..., features).
        cotangent: Cotangent of the product.
        precision: Precision of the product.

    Returns:
        The weight gradient in float32.
    """
    grid = codec.grid(code.shape)
    (tall, wide), batch, columns = grid.block, code.shape[0], cotangent.shape[-1]
    products = jnp.einsum(
        "brktw,brtn->brkwn",
        codec.data(code).reshape(batch, grid.rows, grid.kept, tall, wide),
        grid.rows_of_blocks(cotangent),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    products = products.reshape(-1, wide, columns)
    indices = code.arrays[0].reshape(-1).astype(jnp.int32)
    sums = jax.ops.segment_sum(products, indices, grid.columns)
    return sums.reshape(-1, columns)[: grid.width]


GRADIENTS = {"dense": by_dense, "rows": by_rows, "tpu": block_tpu.by_tpu}
"""The function that computes the weight gradient, for each value of `BlockSparse.product`."""


def choose(codec: BlockSparse, shape: tuple[int, ...], columns: int, itemsize: int) -> Product:
    """Selects the product with the smaller intermediate array, which `product="auto"` uses.

    On one TPU, "auto" uses the TPU kernel instead. The products of "rows" are smaller than the
    dense matrix if blocks are tall: with an `itemsize` of 2 bytes, more than `2 * density *
    columns` rows.

    Args:
        codec: Codec of the left operand.
        shape: Shape of the left operand, (batch, ..., features).
        columns: Number of columns of the weight.
        itemsize: Bytes per element of the left operand.

    Returns:
        "rows" or "dense".

    Example:
        >>> codec = BlockSparse(block=(196, 8), density=0.25)
        >>> choose(codec, (128, 196, 384), 384, 2), choose(codec, (128, 196, 384), 1536, 2)
        ('rows', 'dense')
    """
    grid = codec.grid(shape)
    sums = grid.rows * grid.kept * grid.block[1] * columns * 4
    return "rows" if sums < grid.height * grid.width * itemsize else "dense"


def gradient(
    codec: BlockSparse,
    x: Array | jax.ShapeDtypeStruct,
    columns: int,
    dtype: DTypeLike,
    precision: lax.PrecisionLike = None,
) -> Callable[[Encoded, Array], Array]:
    """Returns the function that computes a weight gradient by `codec.product`.

    Args:
        codec: Codec of the left operand.
        x: The left operand; only its shape and dtype are used.
        columns: Number of columns of the weight.
        dtype: Dtype of the weight gradient.
        precision: Precision of the product.

    Returns:
        A function of the encoded left operand and the cotangent.

    Raises:
        ValueError: If the product is the kernel and it does not support blocks of this size.
    """

    def by(product: Product) -> Callable[[Encoded, Array], Array]:
        def of(code: Encoded, cotangent: Array) -> Array:
            return GRADIENTS[product](codec, code, cotangent, precision).astype(dtype)

        return of

    refusal = block_tpu.refusal(codec, x.shape)
    if codec.product == "auto":
        portable = by(choose(codec, x.shape, columns, x.dtype.itemsize))
        return portable if refusal else on_one("tpu", by("tpu"), portable)
    if codec.product == "tpu" and refusal:
        raise ValueError(f"product='tpu': {refusal}")
    return by(codec.product)
