"""Normalisation, addition and ReLU as one operation, whose one code serves all around it."""

import dataclasses
import functools
import typing

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxcomp.codecs import Offload
from jaxcomp.codecs._codec import Seed
from jaxcomp.codecs._offload import inner_codec, placed_like
from jaxcomp.codecs._sign_aware import SPAN, SignAware
from jaxcomp.ops._coded_array import CodedArray, value
from jaxcomp.ops._norm import Norm
from jaxcomp.ops._norm_act_vjp import Input, NormActVjp, sign, threshold
from jaxcomp.ops._pooling import Padding, Window

# One for each norm: of `x`, and of `residual` if that has one.
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
    axis_index_groups: typing.Any = None,
    codec: SignAware | Offload,
    seed: Seed = None,
) -> tuple[CodedArray, Statistics, Statistics]:
    """`relu(batch_norm(x) + residual)` with one code for it all.

    The result is bit-identical to the operations' in turn. Without `residual`, one code of the
    pre-activation, in units of the norm, serves the norm's backward pass, is ReLU's mask, and goes
    on with the result to the convolutions that read it. With `residual`, the norm's own value has a
    uniform code of its own, and the result's code is the mask and goes on. No range is looked for:
    the norm's statistics are the only metadata. With `SignAware(scale_source="range")` levels lie
    between the extremes of each channel of each sample instead, which are stored, too.

    With `residual_norm` it is `relu(batch_norm(x) + batch_norm(residual))`, as where a network's
    shape changes: the codes of both norms are made where the sum is, and both backward passes share
    what they read, so less moves than with a norm of its own.

    With `pool` the result's maxima over windows are the result, as in the stem of a network: the
    value before pooling is never in memory, and neither is its cotangent. The norm's value has a
    uniform code of its own, too. Of each window the index of its maximum is stored, exactly, in 4
    bits, or 8 if it has over 16 values.

    Mask and statistics are exact; the backward pass is the exact rule at the decoded normalised
    values, `code` decoded by `codec.decode` is what consumers read. With 3 or 4 bits unbiased as
    `ops.batch_norm` is, but for values outside the levels: more than `codec.levels.top` units, or
    more than 4 standard deviations where the norm's value has a code of its own; with ranges there
    are none outside. A NaN or Inf shows in what consumers decode if it reaches statistics, scale or
    bias, as one in `x` does.

    Args:
        x: A convolution's result, or another array with the features last; axis 0 is the batch.
        scale: Multiplies the normalised values.
        bias: Is added to them.
        residual: Is added before ReLU. An array that is no `CodedArray` and has no norm costs a
            pass that finds its channel scale.
        residual_norm: Scale and bias of a batch norm of `residual`, whose options are the same.
        relu: Whether there is a ReLU. Without it the result has no code.
        pool: `window_shape`, `strides` and `padding` of `ops.max_pool`, after ReLU.
        epsilon: Added to the variance.
        use_fast_variance: Whether the variance is E[x^2] - E[x]^2, in one pass.
        axis_name: Mesh or `vmap` axis over which statistics are averaged too, as `ops.batch_norm`.
        axis_index_groups: Groups of indices within that axis.
        codec: Bits of every code, and their scale source: `SignAware`, or `Offload` of it.
        seed: Redraws the rounding noise.

    Returns:
        The result with its code, and the batch's mean and (biased) variance in float32, each as a
        tuple: of `x` and, if there is a `residual_norm`, of `residual`.

    Raises:
        TypeError: If `x` is not a floating-point array.
        ValueError: If there is a `residual` but no ReLU, or a `residual_norm` but no `residual`, or
            a `pool` but no ReLU or with a `residual`, or as `ops.max_pool`, or if levels are to be
            of ranges and `x` has no axes between the batch and the features.

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
    by = typing.cast(SignAware, inner_codec(codec))
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
    by = dataclasses.replace(by, signed=relu and residual is None and window is None)
    op = NormActVjp(norm, by, codec, x.shape, relu, window)
    inputs: tuple[Input, ...] = (Input(x, scale, bias),)
    channel_scale = jnp.hypot(norm.wide(scale), norm.wide(bias))
    if residual is not None and residual_norm is not None:
        inputs += (Input(value(residual), *residual_norm),)
        channel_scale = jnp.hypot(channel_scale, jnp.hypot(*map(norm.wide, residual_norm)))
        residual = None
    elif isinstance(residual, CodedArray):
        channel_scale = jnp.hypot(channel_scale, residual.channel_scale)
        residual = residual.value
    elif residual is not None and by.scale_source == "norm":
        square = lax.square(residual.astype(jnp.float32))
        channel_scale = jnp.hypot(channel_scale, jnp.sqrt(square.mean(axes, keepdims=True)))
    channel_scale = lax.stop_gradient(channel_scale)
    y, code, means, variances = op(inputs, residual, channel_scale, seed)
    # A NaN travels on with a value that has no code, too.
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
    """The part of the elements of a `norm_act` of which some code is clipped to the last level.

    With a pool it is the part of the elements before and after it, which have a code each.

    Args:
        x: Its input, and so are the arguments that follow.
        scale: See there.
        bias: See there.
        means: What it returned.
        variances: What it returned.
        activation: What it returned.
        residual: Its residual, if that has a norm; else None.
        epsilon: Its argument.

    Returns:
        From 0 to 1; NaN if a statistic is.

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
    normalized = [
        norm.standardize(x, mean, var)
        for x, mean, var in zip(inputs, means, variances, strict=True)
    ]
    scale, bias = norm.wide(scale), norm.wide(bias)
    codec = typing.cast(SignAware, inner_codec(activation.codec))
    outside = [jnp.zeros(x.shape, bool)]
    if codec.scale_source == "norm" and codec.signed:
        outside = [codec.clips(normalized[0] * sign(scale), threshold(scale, bias))]
    elif codec.scale_source == "norm":
        outside = [functools.reduce(jnp.logical_or, (jnp.abs(h) > SPAN for h in normalized))]
        if activation.code is not None:
            *_, channel_scale, _ = activation.code.arrays
            above = activation.value > codec.levels.top * channel_scale
            pooled = above.shape != x.shape
            outside = [*outside, above] if pooled else [outside[0] | above]
    unknown = sum((0.0 * h.mean() for h in normalized), jnp.zeros(()))
    count = sum((a.sum() for a in outside), jnp.zeros(()))
    return count / sum(a.size for a in outside) + unknown
