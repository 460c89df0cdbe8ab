"""Convolutions whose input waits for the backward pass compressed."""

import functools
import math
import typing
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxcomp._core.shard_map import match_varying
from jaxcomp.codecs import Codec
from jaxcomp.codecs._codec import Seed
from jaxcomp.codecs._offload import inner_codec
from jaxcomp.ops._coded_array import CodedArray
from jaxcomp.ops._linear import Reads, bilinear
from jaxcomp.ops._pointwise import kernel_gradient
from jaxcomp.ops._sensitivity import Sink


def conv_general_dilated(
    lhs: Float[Array, "..."] | CodedArray,
    rhs: Float[Array, "..."],
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: lax.ConvDimensionNumbers | tuple[str, str, str] | None = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    out_sharding: typing.Any = None,
    codec: Codec | None = None,
    seed: Seed = None,
    sink: Sink | None = None,
) -> Float[Array, "..."]:
    """`jax.lax.conv_general_dilated` that keeps its input for the backward pass by `codec`.

    The result is bit-identical to `lax.conv_general_dilated`; the gradient of `lhs` is exact, that
    of `rhs` is the exact one at the decoded `lhs`. Accepted by Flax layers as
    `conv_general_dilated=`. The codec sees the input channels-last, whatever its layout; of a
    strided 1x1 convolution, only what that reads. A 1x1 kernel's gradient is made of the means that
    `AvgPool` stores and the cotangent's sums over the same windows, a product `window` times
    smaller along each axis; nothing is unpooled.

    Args:
        lhs: Input of 1 to 3 (or more) spatial dimensions; a `CodedArray` (channels last) brings
            its code with it, and `codec` is not asked.
        rhs: Kernel; kept exactly, as the caller holds it anyway.
        window_strides: As `lax.conv_general_dilated`, and so are the arguments that follow.
        padding: See there.
        lhs_dilation: See there.
        rhs_dilation: See there.
        dimension_numbers: See there.
        feature_group_count: See there.
        batch_group_count: See there.
        precision: See there.
        preferred_element_type: See there.
        out_sharding: See there.
        codec: How `lhs` is stored; None leaves everything to `lax.conv_general_dilated`.
        seed: Redraws the rounding noise of the codec.
        sink: Takes the samples' sensitivity as its gradient; see `ops.Sink`. Not without a codec.

    Returns:
        The convolution.

    Raises:
        TypeError: If `lhs` is not a floating-point array.
        ValueError: If the codec cannot store the shape of `lhs`.

    Example:
        >>> import jax
        >>> from jaxcomp import AvgPool
        >>> x, w = jnp.ones((2, 4, 4, 3)), jnp.ones((1, 1, 3, 5))
        >>> layout = ("NHWC", "HWIO", "NHWC")
        >>> f = lambda w: conv_general_dilated(
        ...     x, w, (1, 1), "SAME", dimension_numbers=layout, codec=AvgPool(2)
        ... ).sum()
        >>> jax.grad(f)(w).ravel()[:3].tolist()
        [32.0, 32.0, 32.0]
    """
    stock = functools.partial(
        lax.conv_general_dilated,
        window_strides=window_strides,
        padding=padding,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        dimension_numbers=dimension_numbers,
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )
    code = None
    if isinstance(lhs, CodedArray):
        code, codec = lhs.code, codec if lhs.code is None else lhs.codec
        lhs = lhs.value
    if codec is None:
        return stock(lhs, rhs)
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    batch, channel, *spatial = numbers.lhs_spec
    locations = math.prod(rhs.shape[i] for i in numbers.rhs_spec[2:])
    channels_last = (batch, *spatial, channel)
    if code is not None and (code.shape != lhs.shape or sorted(channels_last) != [*channels_last]):
        raise ValueError(
            f"lhs: expected a CodedArray with its channels last; it is of shape {lhs.shape}, laid "
            f"out as {dimension_numbers}, with a code of shape {code.shape}"
        )
    restore = tuple(sorted(range(lhs.ndim), key=channels_last.__getitem__))

    def conv(lhs: Array, rhs: Array) -> Array:
        return stock(lhs.transpose(restore), rhs)

    x = jnp.transpose(lhs, channels_last)
    uses = locations / feature_group_count
    reads = gradient = None
    kernel = [rhs.shape[i] for i in numbers.rhs_spec[2:]]
    sizes = [lhs.shape[i] for i in spatial]
    pads = padding
    if isinstance(pads, str):
        pads = lax.padtype_to_pads(sizes, kernel, window_strides, pads)
    dense = not any(map(any, pads)) and set(lhs_dilation or ()) <= {1}
    if locations == 1 and dense:
        strided = (slice(None), *(slice(None, None, stride) for stride in window_strides))
        at_stride_1 = functools.partial(stock, window_strides=(1,) * len(spatial))

        def product(part: Array, rhs: Array) -> Array:
            return at_stride_1(part.transpose(restore), rhs)

        reads = Reads(lambda x: x[strided], product)
        x, rhs = match_varying((x, rhs))
        gradient = kernel_gradient(inner_codec(codec), product, numbers, rhs, precision)
    return bilinear(
        conv,
        codec,
        x,
        rhs,
        seed,
        code=code,
        sink=sink,
        uses=uses,
        reads=reads,
        weight_gradient=gradient,
    )


def conv_transpose(
    lhs: Float[Array, "..."],
    rhs: Float[Array, "..."],
    strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    rhs_dilation: Sequence[int] | None = None,
    *,
    transpose_kernel: bool = False,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    codec: Codec | None = None,
    seed: Seed = None,
    sink: Sink | None = None,
) -> Float[Array, "..."]:
    """`jax.lax.conv_transpose` that keeps its input for the backward pass by `codec`.

    The result is bit-identical to `lax.conv_transpose`; the gradient of `lhs` is exact, that of
    `rhs` is the exact one at the decoded `lhs`.

    Args:
        lhs: Input, the channels last.
        rhs: Kernel; kept exactly, as the caller holds it anyway.
        strides: As `lax.conv_transpose`, and so are the arguments that follow.
        padding: See there.
        rhs_dilation: See there.
        transpose_kernel: See there.
        precision: See there.
        preferred_element_type: See there.
        codec: How `lhs` is stored; None leaves everything to `lax.conv_transpose`.
        seed: Redraws the rounding noise of the codec.
        sink: Takes the samples' sensitivity as its gradient; see `ops.Sink`. Not without a codec.

    Returns:
        The transposed convolution.

    Raises:
        TypeError: If `lhs` is not a floating-point array.
        ValueError: If the codec cannot store the shape of `lhs`.

    Example:
        >>> from jaxcomp import Quantize
        >>> x, w = jnp.ones((2, 4, 3)), jnp.ones((2, 3, 5))
        >>> conv_transpose(x, w, (2,), "SAME", codec=Quantize(bits=2)).shape
        (2, 8, 5)
    """
    stock = functools.partial(
        lax.conv_transpose,
        strides=strides,
        padding=padding,
        rhs_dilation=rhs_dilation,
        transpose_kernel=transpose_kernel,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    if codec is None:
        return stock(lhs, rhs)
    uses = math.prod(rhs.shape[:-2]) / math.prod(strides)
    return bilinear(stock, codec, lhs, rhs, seed, sink=sink, uses=uses)
