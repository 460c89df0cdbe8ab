"""Convolutions with a compressed saved input."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

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
    out_sharding: Any = None,
    codec: Codec | None = None,
    seed: Seed = None,
    sink: Sink | None = None,
) -> Float[Array, "..."]:
    """Computes `jax.lax.conv_general_dilated` and saves `lhs` encoded.

    The result is bit-identical to `lax.conv_general_dilated`. The gradient of `lhs` is exact. The
    gradient of `rhs` is computed from the decoded `lhs`. If no gradient of `rhs` is taken, nothing
    is saved. Flax layers accept the function as their `conv_general_dilated` argument.

    The codec sees `lhs` with the channels last, whatever its layout. A strided 1x1 convolution
    saves only the positions that it reads. With `AvgPool`, the gradient of a 1x1 kernel is the
    product of the stored means and the cotangent's sums over the same windows; that product is
    `window` times smaller along each axis, and the means are not expanded.

    Args:
        lhs: Input with one or more spatial axes. A `CodedArray` with a code (channels last)
            replaces `codec` by its own code and codec.
        rhs: Kernel. It is saved exactly; as a parameter it is in memory anyway.
        window_strides: As in `lax.conv_general_dilated`.
        padding: As in `lax.conv_general_dilated`.
        lhs_dilation: As in `lax.conv_general_dilated`.
        rhs_dilation: As in `lax.conv_general_dilated`.
        dimension_numbers: As in `lax.conv_general_dilated`.
        feature_group_count: As in `lax.conv_general_dilated`.
        batch_group_count: As in `lax.conv_general_dilated`.
        precision: As in `lax.conv_general_dilated`.
        preferred_element_type: As in `lax.conv_general_dilated`.
        out_sharding: As in `lax.conv_general_dilated`.
        codec: Codec of `lhs`. None calls `lax.conv_general_dilated`.
        seed: Integer scalar that selects the rounding noise of the codec.
        sink: Argument whose gradient is the sensitivity of each sample (`ops.Sink`). Ignored
            without a codec.

    Returns:
        The convolution.

    Raises:
        TypeError: If the codec cannot store the dtype of `lhs`.
        ValueError: If the codec cannot store the shape of `lhs`, or `lhs` is a `CodedArray` whose
            channels are not last.

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
    return coded_convolution(
        stock,
        lhs,
        rhs,
        window_strides,
        padding,
        lhs_dilation,
        dimension_numbers,
        feature_group_count,
        precision,
        codec,
        seed,
        sink,
    )


def coded_convolution(
    stock: Callable[..., Array],
    lhs: Array | CodedArray,
    rhs: Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None,
    dimension_numbers: lax.ConvDimensionNumbers | tuple[str, str, str] | None,
    feature_group_count: int,
    precision: lax.PrecisionLike,
    codec: Codec | None,
    seed: Seed = None,
    sink: Sink | None = None,
) -> Array:
    """Does what `conv_general_dilated` does, by any function that convolves with these arguments.

    Args:
        stock: From both operands to the result; its keyword `window_strides` replaces the strides.
        lhs: As in `conv_general_dilated`.
        rhs: As there.
        window_strides: As there.
        padding: As there.
        lhs_dilation: As there.
        dimension_numbers: As there.
        feature_group_count: As there.
        precision: As there.
        codec: As there.
        seed: As there.
        sink: As there.
    """
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
        at_stride_1 = functools.partial(stock, window_strides=(1,) * len(spatial))

        def product(part: Array, rhs: Array) -> Array:
            return at_stride_1(part.transpose(restore), rhs)

        if any(stride > 1 for stride in window_strides):
            strided = (slice(None), *(slice(None, None, stride) for stride in window_strides))
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
        convolves=True,
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
    """Computes `jax.lax.conv_transpose` and saves `lhs` encoded.

    The result is bit-identical to `lax.conv_transpose`. The gradient of `lhs` is exact. The
    gradient of `rhs` is computed from the decoded `lhs`. If no gradient of `rhs` is taken, `lhs` is
    not saved.

    Args:
        lhs: Input of shape (batch, spatial..., channels).
        rhs: Kernel. It is saved exactly; as a parameter it is in memory anyway.
        strides: As in `lax.conv_transpose`.
        padding: As in `lax.conv_transpose`.
        rhs_dilation: As in `lax.conv_transpose`.
        transpose_kernel: As in `lax.conv_transpose`.
        precision: As in `lax.conv_transpose`.
        preferred_element_type: As in `lax.conv_transpose`.
        codec: Codec of `lhs`. None calls `lax.conv_transpose`.
        seed: Integer scalar that selects the rounding noise of the codec.
        sink: Argument whose gradient is the sensitivity of each sample (`ops.Sink`). Ignored
            without a codec.

    Returns:
        The transposed convolution.

    Raises:
        TypeError: If the codec cannot store the dtype of `lhs`.
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
    return bilinear(stock, codec, lhs, rhs, seed, sink=sink, uses=uses, convolves=True)
