"""A norm and an activation function as one operation that saves one code."""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxcomp._core import barriers
from jaxcomp._core.layouts import as_convolved
from jaxcomp._core.row_kernels import by_row_kernel
from jaxcomp._core.shard_map import match_varying
from jaxcomp.codecs import Codec, Encoded, SignAware, _dithered, noise, packing
from jaxcomp.codecs._codec import Seed
from jaxcomp.codecs._dithered import Dithered
from jaxcomp.codecs._offload import inner_codec, placed_like
from jaxcomp.codecs._ranges import extremes
from jaxcomp.ops import _curves
from jaxcomp.ops._coded_array import CodedArray
from jaxcomp.ops._curves import IDENTITY, Curve
from jaxcomp.ops._norm_act_vjp import sums_of


class Normalization(abc.ABC):
    """A norm of an array with its features last: `gain * h + offset`, of the normalised array `h`.

    Statistics are of groups of elements. An array that is *wide* has the rank of the normalised
    array, and size 1 along `axes`.

    Attributes:
        axes: Axes along which statistics, gain and offset are constant.
        epsilon: Constant added to the variance.
    """

    axes: tuple[int, ...]
    epsilon: float

    @abc.abstractmethod
    def statistics(self, x: Array) -> tuple[Array, Array]:
        """Returns the mean and the variance of each group."""

    @abc.abstractmethod
    def result(self, x: Array, mean: Array, variance: Array, *parameters: Array) -> Array:
        """Returns the result, to the bit."""

    @abc.abstractmethod
    def affine(self, mean: Array, variance: Array, *parameters: Array) -> tuple[Array, Array]:
        """Returns gain and offset in float32, wide, to rounding."""

    @abc.abstractmethod
    def wide(self, statistic: Array) -> Array:
        """Returns a statistic in float32, wide."""

    @abc.abstractmethod
    def means(self, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        """Returns means over each group, of all devices, of wide sums over `axes`; both wide."""

    @abc.abstractmethod
    def shares(self, cotangents: tuple[Array, ...], x: Array) -> tuple[Array, ...]:
        """Returns wide sums, the means of which are those of cotangents of statistics by group."""


class Kept(NamedTuple):
    """What the backward pass, and operations that read the result, decode.

    Attributes:
        code: Code of the normalised values.
        piece: Packed number of the piece of the activation function; empty if there is one.
        gain: Factor of the normalised values, wide.
        offset: What is added to the product, wide.
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
        kernels: As in `SignAware`.
    """

    bits: int
    curve: Curve
    kernels: bool = False
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
        piece = jnp.zeros((), jnp.int32)
        if kept.piece:
            piece = packing.unpack(kept.piece, shape, self.curve.piece_bits)
        return self.curve, h, step, kept.gain, kept.offset, piece

    def _encode(self, x: Array, seed: Seed) -> tuple[Array, ...]:
        raise NotImplementedError("only a norm and an activation function are encoded together")

    def _decode(self, arrays: tuple[Any, ...], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        return _curves.result(*self.read(Kept(*arrays), shape)).astype(dtype)


def norm_curve(
    norm: Normalization,
    x: Array,
    parameters: tuple[Array, ...],
    curve: Curve,
    activation: Callable[[Array], Array],
    codec: Codec,
    seed: Seed,
) -> tuple[CodedArray, CodedArray, Array, Array]:
    """Computes `activation(norm(x))` and saves one code of the normalised values.

    The code also serves the operations that read the result, and those that read `x`. What follows
    from it by the activation function is corrected for the mean of the noise, so gradients are as
    unbiased as those of `ops.norm_act`.

    Args:
        norm: The norm.
        x: Its argument, features last.
        parameters: What the norm takes for its gain and offset.
        curve: The activation function that `activation` computes.
        activation: The activation function as the program has it.
        codec: `SignAware`, or `Offload` of it. The levels lie between the extremes of each channel
            of each sample, whatever its `scale_source`.
        seed: Integer scalar that selects the rounding noise.

    Returns:
        The result with its code, `x` with the same code, the mean and the variance.
    """
    by = cast(SignAware, inner_codec(codec))
    curved, uncurved = (Curved(by.bits, f, by.kernels) for f in (curve, IDENTITY))
    given, seed = match_varying(((x, *parameters), noise.salt(seed, x)))

    def compute(seed: Array, x: Array, *parameters: Array) -> Any:
        mean, variance = norm.statistics(x)
        code = _encode(norm, x, mean, variance, by.bits, seed)
        z = norm.result(x, mean, variance, *parameters)
        y = activation(z)
        piece = () if curve.piece is None else packing.pack(curve.piece(z), curve.piece_bits)
        unknown = norm.wide(0 * variance)  # NaN where a statistic is
        gain, offset = norm.affine(mean, variance, *parameters)
        y, packed = as_convolved((y, (code, piece)))
        (y, affine, mean, variance), packed = barriers.save_residual(
            (y, (gain + unknown, offset), mean, variance), packed, codec
        )
        affine = barriers.name_residual(barriers.undifferentiable(affine), codec)
        of_x = jnp.sqrt(norm.wide(variance) + norm.epsilon), norm.wide(mean)
        of_x = barriers.name_residual(barriers.undifferentiable(of_x), codec)
        of_result = Encoded((*packed, *affine), y.shape, y.dtype, curved)
        of_argument = Encoded((packed[0], (), *of_x), x.shape, x.dtype, uncurved)
        return (of_result, of_argument), y, mean, variance

    @jax.custom_vjp
    def op(seed: Array, *given: Array) -> Any:
        return compute(seed, *given)

    def forward(seed: Array, x: Array, *parameters: Array) -> Any:
        code, y, mean, variance = compute(seed, x, *parameters)
        statistics = barriers.name_residual((mean, variance), codec)
        return (code, y, mean, variance), (code[0], statistics, parameters)

    def backward(saved: Any, cotangents: Any) -> Any:
        code, (mean, variance), parameters = saved
        _, dy, dmean, dvariance = cotangents

        def read(code: Encoded) -> _curves.Slopes:
            return _curves.slopes(*curved.read(Kept(*code.arrays), code.shape))

        def totals(dy: Array, code: Encoded) -> tuple[Array, Array]:
            _, slope, product = map(hold.use, read(code))
            wide = dy.astype(jnp.float32)
            return _sums(wide * slope, wide * product, axes)

        def gradient(dy: Array, code: Encoded, factor: Array, offset: Array, of_h: Array) -> Array:
            h, slope, _ = read(code)
            dx = factor * (dy.astype(jnp.float32) * slope) + offset
            return (dx + h * of_h).astype(x.dtype)

        by_kernel = functools.partial(by_row_kernel, exact=False, wanted=by.kernels)
        axes = norm.axes
        dy, code = as_convolved((dy, code))
        code, hold = barriers.hold_until(dy, code, codec)
        doffset, dgain = by_kernel(totals)(dy, code)
        doffset = hold.use_in_sum(doffset)
        # Without the barrier, XLA writes the decoded values of one pass for the other.
        code, (doffset, dgain) = barriers.barrier_together(as_convolved(code), (doffset, dgain))
        gain = code.arrays[2]
        asked = norm.shares((dmean, dvariance), dy)
        mean_dh, mean_dhh, dmean, dvariance = norm.means((gain * doffset, gain * dgain, *asked))
        wide_variance = norm.wide(variance)
        deviation = jnp.sqrt(wide_variance + norm.epsilon)
        centre = 2 * deviation * dvariance - mean_dhh / deviation
        # In a constant group h is 0; a clipped variance has no derivative.
        of_h = jnp.where(wide_variance == 0, 0, centre)
        dx = by_kernel(gradient)(dy, code, gain / deviation, dmean - mean_dh / deviation, of_h)
        _, transpose = jax.vjp(lambda *p: norm.affine(mean, variance, *p), *parameters)
        of_parameters = transpose((dgain + norm.wide(0 * variance), doffset))
        return None, dx, *of_parameters

    op.defvjp(forward, backward)
    codes, y, mean, variance = op(seed, *given)
    results = [
        CodedArray(
            value,
            lax.stop_gradient(jnp.hypot(*code.arrays[2:])),
            code,
            placed_like(codec, own),
        )
        for value, code, own in zip((y, given[0]), codes, (curved, uncurved), strict=True)
    ]
    return results[0], results[1], mean, variance


def _encode(
    norm: Normalization, x: Array, mean: Array, variance: Array, bits: int, seed: Array
) -> Dithered:
    """Returns the code of the normalised values, whose range is that of `x`, normalised."""
    mean, factor = norm.wide(mean), lax.rsqrt(norm.wide(variance) + norm.epsilon)

    def standardize(x: Array) -> Array:
        return (x.astype(jnp.float32) - mean) * factor

    return _dithered.encode(standardize(x), bits, seed, extremes(x, function=standardize))


def _sums(one: Array, other: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """Returns the sums of two arrays over some axes, which stay.

    A kernel that sums the elements of a sample alone has few threads, so XLA for GPUs would compute
    the elements in another one, and write them to memory. The last axis is summed first.
    """
    first = axes if 0 in axes else axes[-1:]
    sums = sums_of(one, other, first)
    if first != axes:
        sums = lax.optimization_barrier(sums)
    rest = tuple(axis for axis in axes if axis not in first)
    one, other = (jnp.expand_dims(s, first).sum(rest, keepdims=True) for s in sums)
    return one, other
