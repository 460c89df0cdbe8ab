"""Normalisation, addition and ReLU as one operation, whose one code serves all around it."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxcomp import residuals
from jaxcomp.codecs import Encoded, Offload, noise
from jaxcomp.codecs.codec import Seed
from jaxcomp.codecs.offload import coder, waiting_with
from jaxcomp.codecs.sign_aware import SPAN, Normalized, Preactivation, SignAware
from jaxcomp.ops.activated import Activation, value
from jaxcomp.ops.norm import Norm


def norm_act(
    x: Float[Array, "batch ... features"],
    scale: Float[Array, " features"],
    bias: Float[Array, " features"],
    residual: Float[Array, "batch ... features"] | Activation | None = None,
    *,
    relu: bool = True,
    epsilon: float = 1e-5,
    use_fast_variance: bool = True,
    axis_name: str | None = None,
    axis_index_groups: typing.Any = None,
    codec: SignAware | Offload,
    seed: Seed = None,
) -> tuple[Activation, Float[Array, " features"], Float[Array, " features"]]:
    """`relu(batch_norm(x) + residual)` with one code for it all.

    The result is bit-identical to the three operations'. Without `residual`, one code of the
    pre-activation, in units of the norm, serves the norm's backward pass, is ReLU's mask, and goes
    on with the result to the convolutions that read it. With `residual`, the norm's own value has a
    uniform code of its own, and the result's code is the mask and goes on. No range is looked for:
    the norm's statistics are the only metadata. With `SignAware(unit="range")` levels lie between
    the extremes of each channel of each sample instead, which are stored, too.

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
        residual: Is added before ReLU. An array that is no `Activation` costs a pass that finds its
            unit.
        relu: Whether there is a ReLU. Without it the result has no code, as a shortcut's.
        epsilon: Added to the variance.
        use_fast_variance: Whether the variance is E[x^2] - E[x]^2, in one pass.
        axis_name: Mesh or `vmap` axis over which statistics are averaged too, as `ops.batch_norm`.
        axis_index_groups: Groups of indices within that axis.
        codec: Bits of every code, and their unit: `SignAware`, or `Offload` of it.
        seed: Redraws the rounding noise.

    Returns:
        The result with its code, and the batch's mean and (biased) variance in float32.

    Raises:
        TypeError: If `x` is not a floating-point array.
        ValueError: If there is a `residual` but no ReLU, or if levels are to be of ranges and `x`
            has no axes between the batch and the features.

    Example:
        >>> x = jax.random.normal(jax.random.key(0), (8, 4, 4, 2))
        >>> y, mean, var = norm_act(x, jnp.ones(2), jnp.zeros(2), codec=SignAware(bits=4))
        >>> bool(((y.codec.decode(y.code) > 0) <= (y.value > 0)).all())
        True
    """
    if residual is not None and not relu:
        raise ValueError("residual: expected None with relu=False, since there + does it")
    stored_by = codec
    stored_by.check(x.shape, x.dtype)
    if residual is not None and value(residual).shape != x.shape:
        raise ValueError(f"residual of shape {value(residual).shape}: expected {x.shape}, as x")
    shape, dtype = x.shape, x.dtype
    axes = tuple(range(x.ndim - 1))
    norm = Norm(axes, axes, epsilon, use_fast_variance, axis_name, axis_index_groups)
    codec = typing.cast(SignAware, coder(codec))
    if codec.unit == "range" and x.ndim < 3:
        raise ValueError(
            f"x of shape {x.shape}: expected axes between batch and features, along which "
            'unit="range" has its ranges'
        )
    signed = relu and residual is None
    codec = dataclasses.replace(codec, signed=signed)

    def wide(channels: Array) -> Array:
        return jnp.expand_dims(channels.astype(jnp.float32), axes)

    def compute(
        x: Array, scale: Array, bias: Array, residual: Array | None, unit: Array, seed: Seed
    ) -> tuple[typing.Any, Normalized | None]:
        """The results, and the norm's own code where the result's does not hold it."""
        mean, var = norm.statistics(x)
        var = norm.clip(var)
        # Of x, the same on any number of devices, as a mean is to rounding only. Both codes of an
        # element may share their noise: no gradient multiplies one by the other.
        random = noise.words(x, seed)
        h = (x.astype(jnp.float32) - wide(mean)) * lax.rsqrt(wide(var) + epsilon)
        if not relu:
            x, coded = residuals.keep(x, codec.encode_normalized(h, random), stored_by)
            return (norm.normalize(x, mean, var, scale, bias), None, mean, var), coded
        y = norm.normalize(x, mean, var, scale, bias)
        y = jax.nn.relu(y if residual is None else y + residual)
        unknown = wide(0 * var)  # NaN where a statistic is, for consumers to see
        if residual is None:
            gain, offset = wide(scale), wide(bias)
            travelling: tuple[typing.Any, ...] = codec.encode_preactivation(
                h * _sign(gain), _threshold(gain, offset), y > 0, random
            )
            affine, own = (jnp.abs(gain) + unknown, offset), None
        else:
            *packed, factor, offset = codec.encode_activation(y, unit + unknown, random).arrays
            affine, travelling = (factor, offset), tuple(packed)
            own = codec.encode_normalized(h, random)
        (y, affine), (travelling, own) = residuals.keep((y, affine), (travelling, own), stored_by)
        arrays = *travelling, *residuals.name(residuals.undifferentiable(affine), stored_by)
        return (y, Encoded(arrays, y.shape, y.dtype), mean, var), own

    @jax.custom_vjp
    def op(*args: typing.Any) -> typing.Any:
        return compute(*args)[0]

    def forward(*args: typing.Any) -> typing.Any:
        result, own = compute(*args)
        _, code, _, var = result
        return result, (code, own, residuals.name(var, stored_by), *args[1:3])

    def backward(saved: typing.Any, cotangents: typing.Any) -> tuple[Array | None, ...]:
        code, own, var, scale, bias = saved
        dy, _, dmean, dvar = cotangents

        def read(saved: typing.Any) -> tuple[Array | None, Array]:
            """ReLU's mask and the normalised values."""
            code, own = saved
            if codec.signed:
                h, positive = codec.decode_preactivation(Preactivation(*code.arrays[:-2]), shape)
                return positive, h * _sign(wide(scale))
            passed = None if code is None else codec.positive(code)
            return passed, codec.decode_normalized(own, shape)

        positive, h = residuals.decode_after(dy, (code, own), read)
        dz = dy.astype(jnp.float32)
        if positive is not None:
            dz = jnp.where(positive, dz, 0)
        dscale, dbias = (dz * h).sum(axes) + 0 * var, dz.sum(axes)  # NaN where a statistic is
        dresidual = None
        if residual is not None:
            # It is written anyway: what follows reads it and not what it was made of.
            dresidual, (dscale, dbias) = residuals.tie(dz.astype(dy.dtype), (dscale, dbias))
            dz = dresidual.astype(jnp.float32)
            dresidual = dresidual.astype(value(residual).dtype)
        count = dy.size // dy.shape[-1]
        sums = norm.average(tuple(s / count for s in (dbias, dscale, dmean, dvar)))
        means = [wide(mean) for mean in sums]
        deviation = jnp.sqrt(wide(var) + epsilon)
        factor = wide(scale) / deviation
        dx = factor * dz + (means[2] - factor * means[0])
        slope = 2 * deviation * means[3] - factor * means[1]
        # Of a constant channel h is zero, and where the variance was clipped it has no derivative.
        dx += h * jnp.where(wide(var) == 0, 0, slope)
        dscale, dbias = dscale.astype(scale.dtype), dbias.astype(bias.dtype)
        return dx.astype(dtype), dscale, dbias, dresidual, None, None

    op.defvjp(forward, backward)
    unit = jnp.hypot(wide(scale), wide(bias))
    if isinstance(residual, Activation):
        unit, residual = jnp.hypot(unit, residual.unit), residual.value
    elif residual is not None and codec.unit == "norm":
        square = lax.square(residual.astype(jnp.float32))
        unit = jnp.hypot(unit, jnp.sqrt(square.mean(axes, keepdims=True)))
    unit = lax.stop_gradient(unit)
    y, code, mean, var = op(x, scale, bias, residual, unit, seed)
    unit += lax.stop_gradient(wide(0 * var))  # a NaN travels on with a value that has no code, too
    return Activation(y, unit, code, waiting_with(stored_by, codec)), mean, var


def clipped(
    x: Float[Array, "batch ... features"],
    scale: Float[Array, " features"],
    bias: Float[Array, " features"],
    mean: Float[Array, " features"],
    var: Float[Array, " features"],
    activation: Activation,
    *,
    epsilon: float = 1e-5,
) -> Float[Array, ""]:
    """The part of the elements of a `norm_act` of which some code is clipped to the last level.

    Args:
        x: Its input, and so are the arguments that follow.
        scale: See there.
        bias: See there.
        mean: What it returned.
        var: What it returned.
        activation: What it returned.
        epsilon: Its argument.

    Returns:
        From 0 to 1; NaN if a statistic is.

    Example:
        >>> x = jnp.zeros((100, 2)).at[0].set(1.0)  # ten standard deviations
        >>> ones, zeros = jnp.ones(2), jnp.zeros(2)
        >>> y, mean, var = norm_act(x, ones, zeros, codec=SignAware(bits=2))
        >>> round(float(clipped(x, ones, zeros, mean, var, y)), 4)
        0.01
    """
    axes = tuple(range(x.ndim - 1))
    scale, bias, mean, var = (jnp.expand_dims(a, axes) for a in (scale, bias, mean, var))
    h = (x.astype(jnp.float32) - mean) * lax.rsqrt(var + epsilon)
    codec = typing.cast(SignAware, coder(activation.codec))
    if codec.unit == "range":
        outside = jnp.zeros(h.shape, bool)
    elif codec.signed:
        outside = codec.clips(h * _sign(scale), _threshold(scale, bias))
    else:
        outside = jnp.abs(h) > SPAN
        if activation.code is not None:
            *_, unit, _ = activation.code.arrays
            outside |= activation.value > codec.levels.top * unit
    return jnp.where(outside, 1.0, 0.0 * h).mean()


def _sign(scale: Array) -> Array:
    """Of a norm's scale, so that h times it grows with the pre-activation."""
    return jnp.where(scale < 0, -1.0, 1.0)


def _threshold(scale: Array, bias: Array) -> Array:
    """Where h times its sign has to be for ReLU to pass it."""
    size = jnp.abs(scale)
    always = jnp.where(bias > 0, -jnp.inf, jnp.inf)
    return jnp.where(size == 0, always, -bias / jnp.where(size == 0, 1, size))
