"""The gradient of a 1x1 kernel, made of the input's code where that takes less than the input."""

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
    """How a code of an input, channels last, and a cotangent make the gradient of a 1x1 kernel.

    Args:
        codec: What made the code.
        product: The convolution of what is decoded and a kernel; neither padded nor dilated.
        numbers: Its layout.
        kernel: For its shape and dtype.
        precision: Of a product of matrices.

    Returns:
        None where it takes the decoded input.
    """
    if isinstance(codec, AvgPool):
        return _of_means(codec, product, numbers, kernel)
    if isinstance(codec, SignAware) and not codec.signed:
        return _of_multiples(codec, product, numbers, kernel, precision)
    return None


def _of_means(
    codec: AvgPool, product: Product, numbers: lax.ConvDimensionNumbers, kernel: Array
) -> WeightGradient:
    """Nothing is unpooled.

    Within a window the decoded input is one value, so its products with the cotangent sum to its
    product with the cotangent's sum.
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
    """On a GPU the product is one of integers of 8 bits, then scaled by their channel's scale.

    They are half as long as what they stand for in bfloat16, and XLA for GPUs converts them in the
    kernel of a matrix product, which it does with nothing else that decodes.
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
        *_, channel_scale, _ = code.arrays
        channels, rows = kernel.shape[inputs], cotangent.size // kernel.shape[features]
        if channel_scale.size != channels or math.prod(code.shape) != rows * channels:
            return of_decoded(code, cotangent)  # scales of each sample, or groups
        return platforms.multiply_integers_on_gpu((code, cotangent), of_integers, of_decoded)

    return gradient
