"""Flax's linear layers with a compressed input."""

import dataclasses
import typing
from collections.abc import Callable

from flax import nnx
from jaxtyping import Array, Float

from jaxcomp import ops
from jaxcomp.codecs import Codec
from jaxcomp.nn.coded import Coded, CodedOp
from jaxcomp.ops import Activation


class Conv(Coded, nnx.Conv):
    """`flax.nnx.Conv` that keeps its input for the backward pass as `codec` stores it.

    Constructor, parameters, state and results are those of `flax.nnx.Conv`.

    Args:
        *args: As `flax.nnx.Conv`.
        codec: How the input is stored; None leaves the layer as it is in Flax.
        **kwargs: As `flax.nnx.Conv`, without `conv_general_dilated`.

    Example:
        >>> from jaxcomp import Quantize
        >>> conv = Conv(3, 8, (3, 3), codec=Quantize(bits=2), rngs=nnx.Rngs(0))
        >>> conv.codec.bits
        2
    """

    kind = "conv"

    def __init__(self, *args: typing.Any, codec: Codec | None = None, **kwargs: typing.Any) -> None:
        super().__init__(*args, conv_general_dilated=ops.conv_general_dilated, **kwargs)
        self.codec = codec

    def __call__(
        self, inputs: Float[Array, "..."] | Activation, out_sharding: typing.Any = None
    ) -> Float[Array, "..."]:
        """Convolves `inputs`; of an `Activation` with a code, that waits for the backward pass."""
        if not isinstance(inputs, Activation):
            return super().__call__(inputs, out_sharding)
        if inputs.code is None:
            return super().__call__(inputs.value, out_sharding)
        own = self.conv_general_dilated
        self.conv_general_dilated = _with_code_of(inputs)
        try:
            return super().__call__(inputs.value, out_sharding)
        finally:
            self.conv_general_dilated = own

    @property
    def codec(self) -> Codec | None:
        """How the input is stored."""
        op = self.conv_general_dilated
        return op.codec if isinstance(op, CodedOp) else None

    @codec.setter
    def codec(self, codec: Codec | None) -> None:
        self.check_codec(codec)
        self.conv_general_dilated = CodedOp(ops.conv_general_dilated, codec)


def _with_code_of(activation: Activation) -> Callable[..., Array]:
    def conv(value: Array, kernel: Array, *args: typing.Any, **kwargs: typing.Any) -> Array:
        carried = dataclasses.replace(activation, value=value)
        return ops.conv_general_dilated(carried, kernel, *args, **kwargs)

    return conv


class Linear(Coded, nnx.Linear):
    """`flax.nnx.Linear` that keeps its input for the backward pass as `codec` stores it.

    Constructor, parameters, state and results are those of `flax.nnx.Linear`.

    Args:
        *args: As `flax.nnx.Linear`.
        codec: How the input is stored; None leaves the layer as it is in Flax.
        **kwargs: As `flax.nnx.Linear`, without `dot_general`.

    Example:
        >>> from jaxcomp import Quantize
        >>> Linear(3, 8, codec=Quantize(bits=4), rngs=nnx.Rngs(0)).codec.bits
        4
    """

    kind = "dot"

    def __init__(self, *args: typing.Any, codec: Codec | None = None, **kwargs: typing.Any) -> None:
        super().__init__(*args, dot_general=ops.dot_general, **kwargs)
        self.codec = codec

    @property
    def codec(self) -> Codec | None:
        """How the input is stored."""
        op = self.dot_general
        return op.codec if isinstance(op, CodedOp) else None

    @codec.setter
    def codec(self, codec: Codec | None) -> None:
        self.check_codec(codec)
        self.dot_general = CodedOp(ops.dot_general, codec)
