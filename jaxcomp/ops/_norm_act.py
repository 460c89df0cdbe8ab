"""Normalisation, addition and ReLU as one operation that saves one code."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, cast

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxcomp.codecs import Codec, Offload
from jaxcomp.codecs._codec import Seed
from jaxcomp.codecs._offload import inner_codec, placed_like
from jaxcomp.codecs._sign_aware import SignAware
from jaxcomp.ops._coded_array import CodedArray, value
from jaxcomp.ops._norm import Norm
from jaxcomp.ops._norm_act_vjp import Input, NormActVjp, sign, threshold
from jaxcomp.ops._pooling import Padding, Window

# One array for each norm: that of `x` and, if there is one, that of `residual`.
Statistics = tuple[Float[Array, " features"], ...]


def norm_act(
    x: Float[Array, "batch ... features"],
    scale: Float[Array, " features"],
    bias: Float[Array, " features"],
    residual: Float[Array, "batch ... features"] | CodedArray | None = None,
    *,
    residual_norm: tuple[Float[Array, " features"], Float[Array, " features"]] | None = None,
    relu: bool = True,
    pool: tuple[tuple[int, ...], tuple[int, ...] | None, Padding] | None = None,
    epsilon: float = 1e-5,
    use_fast_variance: bool = True,
    axis_name: str | None = None,
    axis_index_groups: Any = None,
    codec: SignAware | Offload,
    seed: Seed = None,
) -> tuple[CodedArray, Statistics, Statistics]:
    """Computes `relu(batch_norm(x) + residual)` and saves one code for the whole operation.

    The result is bit-identical to that of the separate operations. It is a `CodedArray`: an
    operation that reads it, such as a convolution, saves the same code and encodes nothing.

    What is saved depends on the arguments:

    - Without `residual`: one code of the pre-activation. The norm's backward pass reads it, it is
      the mask of the ReLU, and it is the code of the result.
    - With `residual`: the normalised values have a code of their own. The result has another,
      which is also the mask of the ReLU.
    - With `residual_norm`, the operation is `relu(batch_norm(x) + batch_norm(residual))`, for
      blocks that change the shape. The normalised values of each norm have a code of their own.
      Both backward passes share their reads, so HBM traffic is lower than with two separate norms.
    - With `pool`, the result is the maximum of each window of the ReLU's output, as in the stem of
      a network. Neither the value before pooling nor its cotangent is written to memory. The
      normalised values have a code of their own. The index of each window's maximum is saved
      exactly: in 4 bits, or in 8 bits if a window has more than 16 values.

    By default, the per-channel scale follows from the parameters of the norms, so no pass computes
    ranges, and the norm's statistics are the only metadata. With `SignAware(scale_source="range")`
    the levels lie between the extremes of each channel of each sample, which are saved too.

    Mask and statistics are exact. The backward pass applies the exact rule to the decoded
    normalised values. Operations that read the result decode its code with `codec.decode`. With 3
    or 4 bits, gradients are as unbiased as those of `ops.batch_norm`, except for values that the
    levels clip: 16 times the scale with 4 bits, 12 times with 3. With ranges nothing is
    clipped. A NaN or Inf in `x`, `scale` or `bias`, or in the statistics, makes the decoded values
    of its channel non-finite.

    Args:
        x: float32, bfloat16 or float16 array with the features last, such as the result of a
            convolution; axis 0 is the batch.
        scale: Factor of the normalised values.
        bias: Offset of the scaled values.
        residual: Array that is added before the ReLU: the skip connection. If it is neither a
            `CodedArray` nor normalised by `residual_norm`, one pass computes its per-channel scale.
        residual_norm: Scale and bias of a batch norm of `residual`. Its options are those of the
            first norm.
        relu: Whether to apply the ReLU. Without it the result has no code.
        pool: `window_shape`, `strides` and `padding` of `ops.max_pool`, which is applied after the
            ReLU.
        epsilon: Constant added to the variance.
        use_fast_variance: Whether the variance is computed as E[x^2] - E[x]^2, in one pass.
        axis_name: Mesh or `vmap` axis over which statistics are averaged too, as in
            `ops.batch_norm`.
        axis_index_groups: Groups of indices within that axis, as in `jax.lax.pmean`.
        codec: `SignAware`, or `Offload` of it: bits per element and source of the per-channel
            scale.
        seed: Integer scalar that selects the rounding noise.

    Returns:
        The result with its code, a tuple of means, and a tuple of (biased) variances. Both tuples
        hold float32 statistics of `x` and, with `residual_norm`, of `residual`.

    Raises:
        TypeError: If the codec cannot store the dtype of `x`.
        ValueError: If `residual` is given without a ReLU, `residual_norm` without `residual`, or
            `pool` without a ReLU or with `residual`; if shapes do not match; if `pool` is invalid
            for `ops.max_pool`; or if `scale_source` is "range" and `x` has no axes between the
            batch and the features.

    Example:
        >>> import jax
        >>> x = jax.random.normal(jax.random.key(0), (8, 4, 4, 2))
        >>> y, means, variances = norm_act(x, jnp.ones(2), jnp.zeros(2), codec=SignAware(bits=4))
        >>> bool(((y.codec.decode(y.code) > 0) <= (y.value > 0)).all())
        True
    """
    if residual is not None and not relu:
        raise ValueError("residual: expected None with relu=False, since there + does it")
    if residual_norm is not None:
        if residual is None:
            raise ValueError("residual_norm: expected None without a residual")
        shapes = [jnp.shape(a) for a in residual_norm]
        if shapes != [scale.shape] * 2:
            raise ValueError(f"residual_norm of shapes {shapes}: expected two of {scale.shape}")
    if pool is not None and not (isinstance(pool, tuple) and len(pool) == 3):
        raise ValueError(f"pool={pool}: expected (window_shape, strides, padding)")
    if pool is not None and (residual is not None or not relu):
        raise ValueError(f"pool={pool}: expected None with a residual or with relu=False")
    codec.check(x.shape, x.dtype)
    if residual is not None and value(residual).shape != x.shape:
        raise ValueError(f"residual of shape {value(residual).shape}: expected {x.shape}, as x")
    by = cast(SignAware, inner_codec(codec))
    if by.scale_source == "range" and x.ndim < 3:
        raise ValueError(
            f"x of shape {x.shape}: expected axes between batch and features, along which "
            'scale_source="range" has its ranges'
        )
    window = None
    if pool is not None:
        window = Window(x.shape, *pool)
    axes = tuple(range(x.ndim - 1))
    norm = Norm(axes, axes, epsilon, use_fast_variance, axis_name, axis_index_groups)
    inputs: tuple[Input, ...] = (Input(x, scale, bias),)
    if residual is not None and residual_norm is not None:
        inputs += (Input(value(residual), *residual_norm),)
        residual = None
    return norms_act((norm,) * len(inputs), inputs, residual, relu, window, codec, seed)


def norms_act(
    norms: tuple[Norm, ...],
    inputs: tuple[Input, ...],
    residual: Array | CodedArray | None,
    relu: bool,
    window: Window | None,
    codec: Codec,
    seed: Seed,
) -> tuple[CodedArray, Statistics, Statistics]:
    """Does what `norm_act` does, for any norm of each input and arguments that are checked."""
    norm, x = norms[0], inputs[0].x
    by = cast(SignAware, inner_codec(codec))
    signed = relu and residual is None and window is None and len(inputs) == 1
    by = dataclasses.replace(by, signed=signed)
    op = NormActVjp(norms, by, codec, x.shape, relu, window)
    scales = [jnp.hypot(norm.wide(scale), norm.wide(bias)) for _, scale, bias in inputs]
    channel_scale = functools.reduce(jnp.hypot, scales)
    if isinstance(residual, CodedArray):
        channel_scale = jnp.hypot(channel_scale, residual.channel_scale)
        residual = residual.value
    elif residual is not None and by.scale_source == "norm":
        square = lax.square(residual.astype(jnp.float32))
        channel_scale = jnp.hypot(channel_scale, jnp.sqrt(square.mean(norm.axes, keepdims=True)))
    channel_scale = lax.stop_gradient(channel_scale)
    y, code, means, variances = op(inputs, residual, channel_scale, seed)
    # Also for a result without a code: a NaN in a statistic makes the scale NaN.
    channel_scale += lax.stop_gradient(op.unknown(variances))
    return CodedArray(y, channel_scale, code, placed_like(codec, by)), means, variances


def clipped(
    x: Float[Array, "batch ... features"],
    scale: Float[Array, " features"],
    bias: Float[Array, " features"],
    means: Statistics,
    variances: Statistics,
    activation: CodedArray,
    residual: Float[Array, "batch ... features"] | None = None,
    *,
    epsilon: float = 1e-5,
) -> Float[Array, ""]:
    """Returns the fraction of the elements of a `norm_act` with a code clipped to the last level.

    With a pool, the elements before and after it are counted, as both have a code.

    Args:
        x: Argument `x` of `norm_act`.
        scale: Argument `scale` of `norm_act`.
        bias: Argument `bias` of `norm_act`.
        means: The means that `norm_act` returned.
        variances: The variances that `norm_act` returned.
        activation: The result that `norm_act` returned.
        residual: Argument `residual` of `norm_act`, if it was given with `residual_norm`; else
            None.
        epsilon: Argument `epsilon` of `norm_act`.

    Returns:
        float32 scalar from 0 to 1; NaN if a statistic is NaN.

    Example:
        >>> x = jnp.zeros((100, 2)).at[0].set(1.0)  # ten standard deviations
        >>> ones, zeros = jnp.ones(2), jnp.zeros(2)
        >>> y, means, variances = norm_act(x, ones, zeros, codec=SignAware(bits=2))
        >>> round(float(clipped(x, ones, zeros, means, variances, y)), 4)
        0.01
    """
    axes = tuple(range(x.ndim - 1))
    norm = Norm(axes, axes, epsilon, use_fast_variance=True)
    inputs = [x] if residual is None else [x, residual]
    norms = [norm] * len(inputs)
    return share_clipped(norms, inputs, scale, bias, means, variances, activation)


def share_clipped(
    norms: Sequence[Norm],
    inputs: Sequence[Array],
    scale: Array,
    bias: Array,
    means: Statistics,
    variances: Statistics,
    activation: CodedArray,
) -> Float[Array, ""]:
    """Does what `clipped` does, for any norm of each input.

    `scale` and `bias` are those of the first.
    """
    normalized = [
        norm.standardize(x, mean, var)
        for norm, x, mean, var in zip(norms, inputs, means, variances, strict=True)
    ]
    scale, bias = norms[0].wide(scale), norms[0].wide(bias)
    codec = cast(SignAware, inner_codec(activation.codec))
    outside = [jnp.zeros(normalized[0].shape, bool)]
    if codec.scale_source == "norm" and codec.signed:
        outside = [codec.clips(normalized[0] * sign(scale), threshold(scale, bias))]
    elif codec.scale_source == "norm":
        beyond = (jnp.abs(h) > codec.span for h in normalized)
        outside = [functools.reduce(jnp.logical_or, beyond)]
        if activation.code is not None:
            *_, channel_scale, _ = activation.code.arrays
            above = activation.value > codec.levels.top * channel_scale
            pooled = above.shape != normalized[0].shape
            outside = [*outside, above] if pooled else [outside[0] | above]
    unknown = sum((0.0 * h.mean() for h in normalized), jnp.zeros(()))
    count = sum((a.sum() for a in outside), jnp.zeros(()))
    return count / sum(a.size for a in outside) + unknown
