"""A value that travels with its code, so that every consumer stores the same one."""

import dataclasses
import typing

import jax
from jaxtyping import Array, Float, Shaped

from jaxcomp._core import barriers
from jaxcomp.codecs import Codec, Encoded, noise
from jaxcomp.codecs._offload import inner_codec
from jaxcomp.codecs._sign_aware import SignAware


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CodedArray:
    """An array with the code that its producer made of it; channels last.

    Operations that take one in place of an array keep its code for their backward pass and encode
    nothing themselves. Other functions take `value(x)`.

    Attributes:
        value: The exact array.
        channel_scale: Size of typical values of each channel, float32, of the rank of `value`.
        code: What stands for `value` in backward passes; None where its producer stored nothing.
        codec: What `code` is decoded by.
    """

    value: Float[Array, "batch ... channels"]
    channel_scale: Float[Array, "... channels"]
    code: Encoded | None
    codec: Codec = dataclasses.field(metadata={"static": True})


def value(x: Shaped[Array, "..."] | CodedArray) -> Shaped[Array, "..."]:
    """The array itself, of one that may travel with its code.

    Example:
        >>> import jax.numpy as jnp
        >>> value(jnp.ones(2)).tolist()
        [1.0, 1.0]
    """
    return x.value if isinstance(x, CodedArray) else x


def encode_activation(
    value: Float[Array, "batch ... channels"],
    channel_scale: Float[Array, "... channels"],
    codec: Codec,
) -> CodedArray:
    """Encodes an array without negative values, such as a max pool makes of a `CodedArray`.

    Args:
        value: The array; axis 0 is the batch.
        channel_scale: Size of typical values of each channel, float32, of the rank of `value`.
        codec: What stores it: `SignAware`, or `Offload` of it.
    """
    sign_aware = typing.cast(SignAware, inner_codec(codec))

    @jax.custom_vjp
    def op(value: Array, channel_scale: Array) -> tuple[Array, Encoded]:
        random = noise.words(value, noise.fingerprint(channel_scale))
        code = sign_aware.encode_activation(value, channel_scale, random)
        return barriers.save_residual(value, code, codec)

    def forward(value: Array, channel_scale: Array) -> tuple[tuple[Array, Encoded], None]:
        return op(value, channel_scale), None

    def backward(_: None, cotangents: tuple[Array, Encoded]) -> tuple[Array, None]:
        return cotangents[0], None

    op.defvjp(forward, backward)
    value, code = op(value, channel_scale)
    return CodedArray(value, channel_scale, code, codec)
