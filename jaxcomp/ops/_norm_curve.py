"""A batch norm and a smooth activation function as one operation that saves one code."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxcomp._core import barriers
from jaxcomp._core.shard_map import match_varying
from jaxcomp.codecs import Codec, Encoded, SignAware, _dithered, noise, packing
from jaxcomp.codecs._codec import Seed
from jaxcomp.codecs._dithered import Dithered
from jaxcomp.codecs._offload import inner_codec, placed_like
from jaxcomp.ops import _curves
from jaxcomp.ops._coded_array import CodedArray
from jaxcomp.ops._curves import Curve
from jaxcomp.ops._norm import Norm
from jaxcomp.ops._norm_act_vjp import Input, input_gradients, sums_of


class Kept(NamedTuple):
    """What the backward pass, and operations that read the result, decode.

    Attributes:
        code: Code of the normalised values.
        piece: Packed number of the piece of the activation function; empty if there is one.
        gain: Factor of each feature.
        offset: Offset of each feature.
    """

    code: Dithered
    piece: tuple[Array, ...]
    gain: Array
    offset: Array


@dataclasses.dataclass(frozen=True)
class Curved(Codec):
    """Decodes the result of `norm_curve` from the code of its normalised values.

    Attributes:
        bits: Bits of an element of that code.
        curve: The activation function.
    """

    bits: int
    curve: Curve
    name: ClassVar[str] = "curved"
    kinds = ()

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        """Whether a norm's backward pass is unbiased."""
        return self.bits > 2

    def read(
        self, kept: Kept, shape: tuple[int, ...]
    ) -> tuple[Curve, Array, Array, Array, Array, Array]:
        """Decodes the arguments of `_curves.result`."""
        h, step = _dithered.decode(kept.code, self.bits, shape)
        piece = packing.unpack(kept.piece, shape, 2) if kept.piece else jnp.zeros((), jnp.int32)
        return self.curve, h, step, kept.gain, kept.offset, piece

    def _encode(self, x: Array, seed: Seed) -> tuple[Array, ...]:
        raise NotImplementedError("only a norm and an activation function are encoded together")

    def _decode(self, arrays: tuple[Any, ...], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        return _curves.result(*self.read(Kept(*arrays), shape)).astype(dtype)


def norm_curve(
    norm: Norm,
    given: Input,
    curve: Curve,
    activation: Callable[[Array], Array],
    codec: Codec,
    seed: Seed,
) -> tuple[CodedArray, Float[Array, " features"], Float[Array, " features"]]:
    """Computes `activation(batch_norm(x))` and saves one code of the normalised values.

    The code also serves the operations that read the result. What follows from it by the
    activation function is corrected for the mean of the noise, so gradients are as unbiased as
    those of `ops.norm_act`.

    Args:
        norm: The norm.
        given: Its arguments.
        curve: The activation function that `activation` computes.
        activation: The activation function as the program has it.
        codec: `SignAware`, or `Offload` of it. The levels lie between the extremes of each channel
            of each sample, whatever its `scale_source`.
        seed: Integer scalar that selects the rounding noise.

    Returns:
        The result with its code, the mean and the variance.
    """
    curved = Curved(cast(SignAware, inner_codec(codec)).bits, curve)
    given, seed = match_varying((given, noise.salt(seed, given.x)))
    like = jax.eval_shape(lambda given: given, given)

    def compute(x: Array, scale: Array, bias: Array, seed: Array) -> Any:
        mean, variance = norm.statistics(x)
        variance = norm.clip(variance)
        code = _dithered.encode(norm.standardize(x, mean, variance), curved.bits, seed)
        z = norm.normalize(x, mean, variance, scale, bias)
        y = activation(z)
        piece = () if curve.piece is None else packing.pack(curve.piece(z), 2)
        unknown = norm.wide(0 * variance)  # NaN where a statistic is
        affine = norm.wide(scale) + unknown, norm.wide(bias)
        (y, affine, variance), packed = barriers.save_residual(
            (y, affine, variance), (code, piece), codec
        )
        affine = barriers.name_residual(barriers.undifferentiable(affine), codec)
        return Encoded((*packed, *affine), y.shape, y.dtype, curved), y, mean, variance

    @jax.custom_vjp
    def op(*arguments: Array) -> Any:
        return compute(*arguments)

    def forward(*arguments: Array) -> Any:
        code, *results, variance = compute(*arguments)
        saved = code, barriers.name_residual(variance, codec)
        return (code, *results, variance), saved

    def backward(saved: Any, cotangents: Any) -> Any:
        code, variance = saved
        _, dy, dmean, dvariance = cotangents

        def read(code: Encoded) -> _curves.Slopes:
            return _curves.slopes(*curved.read(Kept(*code.arrays), code.shape))

        _, slope, product = barriers.decode_after(dy, code, read, codec)
        wide, unknown = dy.astype(jnp.float32), 0 * variance
        dbias, dscale = sums_of(wide * slope, wide * product, norm.axes)
        sums = dbias, [dscale + unknown]
        # Without the barrier, XLA writes the decoded values of one pass for the other.
        code, sums = barriers.barrier_together(code, sums)
        h, slope, _ = read(code)
        dz = wide * slope
        scale = code.arrays[2].reshape(variance.shape)
        (found,) = input_gradients(
            norm, dz, [h], (variance,), [scale], sums, (dmean,), (dvariance,)
        )
        return *(d.astype(a.dtype) for d, a in zip(found, like, strict=True)), None

    op.defvjp(forward, backward)
    code, y, mean, variance = op(*given, seed)
    channel_scale = jnp.hypot(norm.wide(given.scale), norm.wide(given.bias))
    channel_scale = jax.lax.stop_gradient(channel_scale + norm.wide(0 * variance))
    return CodedArray(y, channel_scale, code, placed_like(codec, curved)), mean, variance
