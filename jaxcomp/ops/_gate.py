"""A coded array times one factor for each channel of each sample, such as squeeze-and-excite."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxcomp._core import barriers
from jaxcomp._core.shard_map import match_varying
from jaxcomp.codecs import Codec, Encoded
from jaxcomp.codecs._codec import Seed, channel_axes
from jaxcomp.codecs._offload import inner_codec, placed_like
from jaxcomp.codecs._ranges import with_nans
from jaxcomp.ops._coded_array import CodedArray


@dataclasses.dataclass(frozen=True)
class Gated(Codec):
    """Decodes a coded array and multiplies it by a factor, which is the last array of the code.

    Attributes:
        codec: Decodes the coded array.
    """

    codec: Codec
    name: ClassVar[str] = "gated"
    kinds = ()

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        """Whether the coded array is decoded without bias."""
        return self.codec.unbiased

    def _encode(self, x: Array, seed: Seed) -> tuple[Array, ...]:
        raise NotImplementedError("a product is not encoded: its operand has a code")

    def _decode(self, arrays: tuple[Any, ...], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        *coded, factor = arrays
        decoded = self.codec._decode(tuple(coded), shape, jnp.float32)
        return (decoded * factor.astype(jnp.float32)).astype(dtype)


def gate(x: CodedArray, factor: Float[Array, "batch ... channels"]) -> CodedArray:
    """Computes `x * factor`, and saves nothing but the factor.

    The gradient of the factor is computed from the decoded `x`. Operations that read the result
    decode the same code.

    Args:
        x: Array with a code.
        factor: Array of the rank of `x`, of size 1 between batch and channels.

    Returns:
        The product with its code.

    Raises:
        ValueError: If `x` has no code.
    """
    codec = inner_codec(x.codec)
    if x.code is None:
        raise ValueError("x: expected an array with a code; it has None")
    given = match_varying((x.value, x.code, factor))

    @jax.custom_vjp
    def op(value: Array, code: Encoded, factor: Array) -> Array:
        return value * factor

    def forward(value: Array, code: Encoded, factor: Array) -> Any:
        return value * factor, (code, factor)

    def backward(saved: Any, dy: Array) -> Any:
        code, factor = saved
        decoded = barriers.decode_after(dy, code, codec.decode, x.codec)
        product = dy.astype(jnp.float32) * decoded.astype(jnp.float32)
        # Sums of rows first: XLA for GPUs writes what a kernel of few sums decodes to memory.
        rows = barriers.materialize(product.sum(-2, keepdims=True))
        dfactor = rows.sum(channel_axes(dy.ndim), keepdims=True)
        return dy * factor, None, dfactor.astype(factor.dtype)

    op.defvjp(forward, backward)
    made = op(*given)
    _, code, factor = given
    factor = jax.lax.stop_gradient(factor)
    gated = Gated(codec)
    product = Encoded((*code.arrays, factor), made.shape, made.dtype, gated)
    largest = with_nans(jnp.abs(factor).max(0, keepdims=True), factor, (0,))
    return CodedArray(made, x.channel_scale * largest, product, placed_like(x.codec, gated))
