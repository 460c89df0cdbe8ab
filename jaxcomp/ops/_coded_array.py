"""An array together with its code, so that all operations that read it save the same code."""

import dataclasses
from collections.abc import Callable
from typing import NoReturn, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from jaxcomp._core import barriers
from jaxcomp.codecs import Codec, Encoded, noise
from jaxcomp.codecs._codec import Seed
from jaxcomp.codecs._offload import inner_codec
from jaxcomp.codecs._sign_aware import SignAware

_REMEDY = "expected jaxcomp.ops.value(x), the array without its code"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CodedArray:
    """An array with the code that the operation that computed it already made; channels last.

    Operations that accept a `CodedArray` save its code for their backward pass and encode nothing.
    Other functions take the plain array, `value(x)`.

    Attributes:
        value: The exact array, (batch, ..., channels).
        channel_scale: Typical magnitude of the values of each channel; float32, of the rank of
            `value`.
        code: The encoded `value`, which backward passes read. None if nothing was encoded.
        codec: Codec that decodes `code`.
    """

    value: Float[Array, "batch ... channels"]
    channel_scale: Float[Array, "... channels"]
    code: Encoded | None
    codec: Codec = dataclasses.field(metadata={"static": True})

    def __getattr__(self, name: str) -> NoReturn:
        """Tells how to get at the methods of the array."""
        raise AttributeError(f"'CodedArray' object has no attribute {name!r}: {_REMEDY}")

    def __jax_array__(self) -> NoReturn:
        """Tells functions of `jax.numpy`, and arrays, how to get at the array."""
        raise TypeError(f"a CodedArray was given as an array: {_REMEDY}")


def value(x: Shaped[Array, "..."] | CodedArray) -> Shaped[Array, "..."]:
    """Returns the plain array of a `CodedArray`; any other array is returned as it is.

    Args:
        x: An array, or a `CodedArray`.

    Returns:
        The array.

    Example:
        >>> import jax.numpy as jnp
        >>> value(jnp.ones(2)).tolist()
        [1.0, 1.0]
    """
    return x.value if isinstance(x, CodedArray) else x


def encode_operand(
    value: Float[Array, "batch ... channels"], codec: Codec, seed: Seed
) -> CodedArray:
    """Encodes an array that several products read.

    Args:
        value: Floating-point array of shape (batch, ..., channels).
        codec: Its codec.
        seed: Integer scalar that selects the rounding noise of the codec.

    Returns:
        The array with its code. Its gradient is the identity.
    """
    of_call = jnp.uint32(0) if seed is None else jnp.asarray(seed)
    value, code = _with_code(codec.encode, value, of_call, codec)
    scale = jnp.ones((*(1,) * (value.ndim - 1), value.shape[-1]))
    return CodedArray(value, scale, barriers.name_residual(code, codec), codec)


def encode_activation(
    value: Float[Array, "batch ... channels"],
    channel_scale: Float[Array, "... channels"],
    codec: Codec,
) -> CodedArray:
    """Encodes an array without negative values, such as the result of a max pool of a `CodedArray`.

    Args:
        value: Floating-point array of shape (batch, ..., channels).
        channel_scale: Typical magnitude of the values of each channel; float32, of the rank of
            `value`.
        codec: `SignAware`, or `Offload` of it.

    Returns:
        The array with its code. Its gradient is the identity.

    Example:
        >>> import jax.numpy as jnp
        >>> x = encode_activation(jnp.ones((2, 3, 3, 4)), jnp.ones((1, 1, 1, 4)), SignAware(bits=4))
        >>> x.code.shape
        (2, 3, 3, 4)
    """
    sign_aware = cast(SignAware, inner_codec(codec))

    def encode(value: Array, channel_scale: Array) -> Encoded:
        salt = noise.salt(noise.fingerprint(channel_scale), value)
        return sign_aware.encode_activation(value, channel_scale, salt)

    value, code = _with_code(encode, value, channel_scale, codec)
    return CodedArray(value, channel_scale, code, codec)


def _with_code(
    encode: Callable[[Array, Array], Encoded], value: Array, argument: Array, codec: Codec
) -> tuple[Array, Encoded]:
    """Returns an array and its code. The gradient of the array is the identity."""

    @jax.custom_vjp
    def op(value: Array, argument: Array) -> tuple[Array, Encoded]:
        return barriers.save_residual(value, encode(value, argument), codec)

    def forward(value: Array, argument: Array) -> tuple[tuple[Array, Encoded], None]:
        return op(value, argument), None

    def backward(_: None, cotangents: tuple[Array, Encoded]) -> tuple[Array, None]:
        return cotangents[0], None

    op.defvjp(forward, backward)
    return op(value, argument)
