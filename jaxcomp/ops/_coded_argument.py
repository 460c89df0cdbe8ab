"""Activation functions and gated linear units that save one code of each operand."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxcomp._core import barriers
from jaxcomp._core.shard_map import match_varying
from jaxcomp.codecs import Codec, Encoded, Quantize, _dithered, noise
from jaxcomp.codecs._codec import Seed
from jaxcomp.codecs._dithered import Dithered
from jaxcomp.codecs._offload import inner_codec, placed_like
from jaxcomp.codecs._ranges import extremes
from jaxcomp.ops import _curves
from jaxcomp.ops._coded_array import CodedArray
from jaxcomp.ops._curves import Curve

_LINEAR_FROM = 4.0  # a GELU and a SiLU are nearly linear from here on
_SCALE = 2.0  # beyond, the distance of levels grows by a factor of e for every 2 more


@dataclasses.dataclass(frozen=True)
class CodedArgument(Codec):
    """Encodes the argument of an activation function, and decodes its result.

    Levels are equidistant up to 4. Beyond 4, where the function is nearly linear, their distance
    grows exponentially, so that a few large values leave the others precise. All arguments at which
    the function is nearly 0 are encoded as one. What is decoded is corrected for the mean of the
    noise, as in `_curves.result`: the bias of a derivative is below 0.004 where levels are at most
    1 apart, below 0.04 where they are 2 apart, and large beyond.

    Attributes:
        quantize: Sets the bits, and which values share a range.
        curve: The activation function, of one piece.
    """

    quantize: Quantize
    curve: Curve
    name: ClassVar[str] = "coded_argument"
    kinds = ()
    unbiased = True
    fuses_decode_on_tpu = True

    def _encode(self, x: Array, seed: Seed) -> tuple[Any, ...]:
        return (self.encode_between(x, seed, self._level),)

    def encode_between(
        self, x: Array, seed: Seed, function: Callable[[Array], Array] = lambda x: x
    ) -> Dithered:
        """Encodes an increasing function of `x` on equidistant levels between its extremes."""
        ends = extremes(x, self.quantize.range_axes(x.shape), function)
        return _dithered.encode(function(x.astype(jnp.float32)), self.quantize.bits, seed, ends)

    def _level(self, x: Array) -> Array:
        x = jnp.maximum(x, self.curve.zero_below) + 0 * x  # NaN where x is infinite
        above = jnp.maximum(x - _LINEAR_FROM, 0)
        return x - above + _SCALE * jnp.log(1 + above / _SCALE)

    def _decode(self, arrays: tuple[Any, ...], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        return self.function(arrays, shape, 0).astype(dtype)

    def function(self, arrays: tuple[Any, ...], shape: tuple[int, ...], order: int) -> Array:
        """Returns the function, or its derivative of order 1, from the argument's code; float32."""
        (code,) = arrays
        h, step = _dithered.decode(cast(Dithered, code), self.quantize.bits, shape)
        excess, piece = _curves.excess(step), jnp.zeros((), jnp.int32)
        below = jnp.minimum(h, _LINEAR_FROM)
        above = h - below
        if self.curve.is_identity_above <= _LINEAR_FROM:
            f = self.curve.derivatives(below, piece)
            if order == 1:
                return f[1] - excess * f[3]
            stretch = jnp.exp(above / _SCALE)
            second = jnp.where(above > 0, stretch / _SCALE, f[2])
            return f[0] + _SCALE * (stretch - 1) - excess * second
        stretch = jnp.exp(above / _SCALE)
        f = self.curve.derivatives(below + _SCALE * (stretch - 1), piece)
        second = jnp.where(above > 0, stretch / _SCALE, 0)  # of z by h, as `stretch` is the first
        return f[order] - excess * (f[order + 2] * stretch * stretch + f[order + 1] * second)


@dataclasses.dataclass(frozen=True)
class GatedLinearUnit(Codec):
    """Decodes the product of an activation function and another value from their two codes.

    The codes have independent noise, so products of what is decoded are unbiased, too.

    Attributes:
        argument: Codec of the function's argument.
    """

    argument: CodedArgument
    name: ClassVar[str] = "gated_linear_unit"
    kinds = ()
    unbiased = True
    fuses_decode_on_tpu = True

    def _encode(self, x: Array, seed: Seed) -> tuple[Array, ...]:
        raise NotImplementedError("a product is not encoded: its factors have codes")

    def _decode(self, arrays: tuple[Any, ...], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        function, factor = self.factors(arrays, shape, 0)
        return (function * factor).astype(dtype)

    def factors(
        self, arrays: tuple[Any, ...], shape: tuple[int, ...], order: int
    ) -> tuple[Array, Array]:
        """Returns a derivative of the activation function, and the other value; float32."""
        argument, factor = arrays
        decoded, _ = _dithered.decode(factor, self.argument.quantize.bits, shape)
        return self.argument.function((argument,), shape, order), decoded


def coded_activation(
    operands: Sequence[Array],
    of: Curve,
    function: Callable[..., Array],
    codec: Codec,
    seed: Seed,
) -> CodedArray:
    """Computes `function(x)`, or `function(x, factor)` of a gated linear unit; saves their codes.

    The backward pass computes the derivatives from them, and products that read the result compute
    the result from them.

    Args:
        operands: The argument of an activation function, and what its result is multiplied by, if
            there is such a factor: float32, bfloat16 or float16 arrays; axis 0 is the batch.
        of: The activation function, of one piece.
        function: The operation as the program has it. The result may have another dtype.
        codec: `Quantize`, or `Offload` of it. It sets the bits and which values share a range.
        seed: Integer scalar that selects the rounding noise; another for each call, iteration and
            lane of `jax.vmap`.

    Returns:
        The result with its code.
    """
    argument = CodedArgument(cast(Quantize, inner_codec(codec)), of)
    gated = GatedLinearUnit(argument)
    own = argument if len(operands) == 1 else gated
    operands, seed = match_varying((tuple(operands), seed))
    dtype = operands[0].dtype

    def compute(operands: tuple[Array, ...], seed: Seed) -> tuple[Encoded, Array]:
        x, *factors = operands
        arrays = argument._encode(x, seed)
        for factor in factors:
            of_factor = noise.folded(seed, jnp.uint32(1))
            arrays += (argument.encode_between(factor, of_factor),)
        y, arrays = barriers.save_operands(operands, lambda xs: function(*xs), arrays, codec)
        return Encoded(arrays, y.shape, y.dtype, own), y

    @jax.custom_vjp
    def op(operands: tuple[Array, ...], seed: Seed) -> tuple[Encoded, Array]:
        return compute(operands, seed)

    def forward(operands: tuple[Array, ...], seed: Seed) -> Any:
        code, y = compute(operands, seed)
        return (code, y), code

    def backward(code: Encoded, cotangents: tuple[Encoded, Array]) -> Any:
        _, dy = cotangents

        def read(code: Encoded) -> tuple[Array, ...]:
            if len(code.arrays) == 1:
                return (argument.function(code.arrays, code.shape, 1),)
            slope, factor = gated.factors(code.arrays, code.shape, 1)
            return slope * factor, argument.function(code.arrays[:1], code.shape, 0)

        derivatives = barriers.decode_after(dy, code, read, placed_like(codec, own))
        wide = dy.astype(jnp.float32)
        return tuple((wide * d).astype(dtype) for d in derivatives), None

    op.defvjp(forward, backward)
    code, y = op(operands, seed)
    scale = jnp.ones((*(1,) * (y.ndim - 1), y.shape[-1]))
    return CodedArray(y, scale, code, placed_like(codec, own))
