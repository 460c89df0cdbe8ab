"""An activation function that saves one code of its argument."""

import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxcomp._core import barriers
from jaxcomp._core.shard_map import match_varying
from jaxcomp.codecs import Codec, Encoded, Quantize, _dithered, noise
from jaxcomp.codecs._codec import Seed
from jaxcomp.codecs._offload import inner_codec, placed_like
from jaxcomp.ops import _curves
from jaxcomp.ops._coded_array import CodedArray
from jaxcomp.ops._curves import Curve
from jaxcomp.ops._norm_curve import Curved, Kept


def curve(
    x: Array, of: Curve, function: Callable[[Array], Array], codec: Codec, seed: Seed
) -> CodedArray:
    """Computes `function(x)` and saves one code of `x`.

    The backward pass computes the derivative from it, and products that read the result compute
    the result from it. Both are corrected for the mean of the noise (`_curves`).

    Args:
        x: float32, bfloat16 or float16 array; axis 0 is the batch.
        of: The activation function that `function` computes, of one piece.
        function: The activation function as the program has it.
        codec: `Quantize`, or `Offload` of it. It sets the bits and which values share a range.
        seed: Integer scalar that selects the rounding noise.

    Returns:
        The result with its code.
    """
    quantize = typing.cast(Quantize, inner_codec(codec))
    curved = Curved(quantize.bits, of)
    x, seed = match_varying((x, noise.folded(seed, noise.spot_check(x))))
    axes = quantize.range_axes(x.shape)

    def compute(x: Array, seed: Seed) -> tuple[Encoded, Array]:
        code = _dithered.encode(x.astype(jnp.float32), curved.bits, seed, axes)
        y, (kept,) = barriers.save_residual(function(x), (code,), codec)
        return Encoded((kept,), y.shape, y.dtype), y

    @jax.custom_vjp
    def op(x: Array, seed: Seed) -> tuple[Encoded, Array]:
        return compute(x, seed)

    def forward(x: Array, seed: Seed) -> typing.Any:
        code, y = compute(x, seed)
        return (code, y), code

    def backward(code: Encoded, cotangents: tuple[Encoded, Array]) -> tuple[Array, None]:
        _, dy = cotangents

        def read(code: Encoded) -> Array:
            return _curves.slopes(*curved.read(Kept(*code.arrays), code.shape)).slope

        slope = barriers.decode_after(dy, code, read, codec)
        return (dy.astype(jnp.float32) * slope).astype(dy.dtype), None

    op.defvjp(forward, backward)
    code, y = op(x, seed)
    return CodedArray(y, jnp.ones((1,) * y.ndim), code, placed_like(codec, curved))
