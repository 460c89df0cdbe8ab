"""Gradients of 1x1 kernels, computed from the code of the input where that is cheaper."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxcomp._core import platforms
from jaxcomp._core.shard_map import type_like
from jaxcomp.codecs import AvgPool, Codec, Encoded, SignAware
from jaxcomp.ops._linear import WeightGradient

Product = Callable[[Array, Array], Array]


def kernel_gradient(
    codec: Codec,
    product: Product,
    numbers: lax.ConvDimensionNumbers,
    kernel: Array,
    precision: lax.PrecisionLike,
) -> WeightGradient | None:
    """Returns the function that computes the gradient of a 1x1 kernel from the input's code.

    Args:
        codec: Codec of the input; the features are last.
        product: The convolution of the decoded input and a kernel, without padding or dilation.
        numbers: Layout of the convolution.
        kernel: The kernel; only its shape and dtype are used.
        precision: Precision of a matrix product.

    Returns:
        A function of the encoded input and the cotangent. None if the codec has no such form and
        the decoded input is needed.
    """
    if isinstance(codec, AvgPool) and codec.deviation is None:
        return _of_means(codec, product, numbers, kernel)
    if isinstance(codec, SignAware) and not codec.signed:
        return _of_multiples(codec, product, numbers, kernel, precision)
    return None


def _of_means(
    codec: AvgPool, product: Product, numbers: lax.ConvDimensionNumbers, kernel: Array
) -> WeightGradient:
    """Returns the gradient for `AvgPool`, which uses the stored means as they are.

    The decoded input is constant within a window. The sum of its products with the cotangent equals
    its product with the cotangent's sum.
    """
    batch, channel, *spatial = numbers.out_spec
    channels_last = (batch, *spatial, channel)
    restore = tuple(sorted(range(len(channels_last)), key=channels_last.__getitem__))
    of_kernel = type_like(kernel)

    def gradient(code: Encoded, cotangent: Array) -> Array:
        (means,) = code.arrays
        sums = codec.sums(cotangent.transpose(channels_last)).astype(cotangent.dtype)
        (dkernel,) = jax.linear_transpose(functools.partial(product, means), of_kernel)(
            sums.transpose(restore)
        )
        return dkernel

    return gradient


def _of_multiples(
    codec: SignAware,
    product: Product,
    numbers: lax.ConvDimensionNumbers,
    kernel: Array,
    precision: lax.PrecisionLike,
) -> WeightGradient:
    """Returns the gradient for `SignAware`: on a GPU, a product of 8-bit integers.

    The product is scaled by the per-channel scale of the input. The integers take half the bytes of
    decoded bfloat16 values. XLA for GPUs fuses the conversion of integers, but no other decoding,
    into a matrix product. They are decoded without dither, on all platforms.
    """
    batch, channel, *spatial = numbers.out_spec
    features, inputs, *ones = numbers.rhs_spec
    of_kernel = type_like(kernel)

    def of_integers(code: Encoded, cotangent: Array) -> Array:
        multiples, channel_scale = codec.multiples(code)
        cotangent = cotangent.transpose(batch, *spatial, channel)
        places = tuple(range(cotangent.ndim - 1))
        dkernel = lax.dot_general(
            multiples.astype(cotangent.dtype),
            cotangent,
            ((places, places), ((), ())),
            precision=precision,
            preferred_element_type=jnp.promote_types(cotangent.dtype, jnp.float32),
        )
        dkernel = (dkernel * channel_scale.reshape(-1, 1)).astype(kernel.dtype)
        return jnp.expand_dims(dkernel if inputs < features else dkernel.T, ones)

    def of_decoded(code: Encoded, cotangent: Array) -> Array:
        decoded = codec.decode(code)
        (dkernel,) = jax.linear_transpose(functools.partial(product, decoded), of_kernel)(cotangent)
        return dkernel

    def gradient(code: Encoded, cotangent: Array) -> Array:
        *packed, _, channel_scale, offset = code.arrays
        code = dataclasses.replace(code, arrays=(*packed, None, channel_scale, offset))
        channels, rows = kernel.shape[inputs], cotangent.size // kernel.shape[features]
        if channel_scale.size != channels or math.prod(code.shape) != rows * channels:
            return of_decoded(code, cotangent)  # scales for each sample, or feature groups
        return platforms.multiply_integers_on_gpu((code, cotangent), of_integers, of_decoded)

    return gradient
