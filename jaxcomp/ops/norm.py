"""Normalisation whose input waits for the backward pass compressed."""

import functools
import typing

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxcomp import residuals
from jaxcomp.codecs import Codec
from jaxcomp.codecs.codec import Seed

Stats = tuple[Array, Array]


def batch_norm(
    x: Float[Array, "..."],
    scale: Float[Array, " features"] | None,
    bias: Float[Array, " features"] | None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    use_fast_variance: bool = True,
    axis_name: str | None = None,
    axis_index_groups: typing.Any = None,
    mask: Array | None = None,
    codec: Codec | None = None,
    seed: Seed = None,
) -> tuple[Float[Array, "..."], Float[Array, " features"], Float[Array, " features"]]:
    """Batch normalisation by the batch's own statistics, its input kept as `codec` stores it.

    Results are bit-identical to those of `flax.nnx.BatchNorm` in training. Mean and variance are
    kept exactly; the backward pass is the exact one with these statistics at the decoded `x`. What
    it uses twice, the normalised value in the gradient of `x`, makes that gradient biased by the
    code's variance (in units of the batch's) divided by the number of values per feature, relative
    to the cotangent. Where the gradient is much smaller than the cotangent, as sums over it are,
    the bias is larger relative to it. The codec sees the features last, and masked-out values too:
    fill them with something inside the others' range.

    Args:
        x: Activations; axis 0 is the batch.
        scale: Multiplies the normalised values, or None.
        bias: Is added to them, or None.
        axis: The feature axis; statistics are taken over all others.
        epsilon: Added to the variance.
        use_fast_variance: Whether the variance is E[x^2] - E[x]^2, in one pass.
        axis_name: Mesh or `vmap` axis over which statistics are averaged too. Of a `vmap` axis the
            gradient must be taken inside: JAX runs a custom backward rule outside without its name.
        axis_index_groups: Groups of indices within that axis, as `jax.lax.pmean` takes them.
        mask: True where a value counts for the statistics; broadcastable to `x`.
        codec: How `x` is stored; None leaves differentiation to JAX.
        seed: Redraws the rounding noise of the codec.

    Returns:
        The normalised array in the dtype of `x`, `scale` and `bias` together, and the mean and the
        (biased) variance of the batch in float32.

    Raises:
        TypeError: If `x` is not a floating-point array.
        ValueError: If `x` has no such axis, or the codec cannot store its shape.

    Example:
        >>> from jaxcomp import Quantize
        >>> x = jnp.arange(6.0).reshape(3, 2)
        >>> y, mean, var = batch_norm(x, None, None, codec=Quantize(bits=8))
        >>> mean.tolist()
        [2.0, 3.0]
    """
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis={axis}: x of shape {x.shape} has no such axis")
    feature = axis % x.ndim
    axes = tuple(i for i in range(x.ndim) if i != feature)
    average = functools.partial(_pmean, axis_name=axis_name, axis_index_groups=axis_index_groups)

    def statistics(x: Array, mask: Array | None) -> Stats:
        x = x.astype(jnp.float32)
        if use_fast_variance:
            mean, square = average((x.mean(axes, where=mask), lax.square(x).mean(axes, where=mask)))
            return mean, square - lax.square(mean)
        (mean,) = average((x.mean(axes, where=mask),))
        square = lax.square(x - jnp.expand_dims(mean, axes))
        (var,) = average((square.mean(axes, where=mask),))
        return mean, var

    def clip(var: Array) -> Array:  # E[x^2] - E[x]^2 may come out negative
        return jnp.maximum(0.0, var) if use_fast_variance else var

    def normalize(
        x: Array, mean: Array, var: Array, scale: Array | None, bias: Array | None
    ) -> Array:
        dtype = jnp.result_type(*(a for a in (x, scale, bias) if a is not None))
        x = x - jnp.expand_dims(mean, axes)
        factor = lax.rsqrt(jnp.expand_dims(var, axes) + epsilon)
        if scale is not None:
            factor *= jnp.expand_dims(scale, axes)
        x *= factor
        if bias is not None:
            x += jnp.expand_dims(bias, axes)
        return x.astype(dtype)

    def stock(
        x: Array, scale: Array | None, bias: Array | None, mask: Array | None, seed: Seed
    ) -> tuple[Array, Array, Array]:
        mean, var = statistics(x, mask)
        return normalize(x, mean, clip(var), scale, bias), mean, clip(var)

    if codec is None:
        return stock(x, scale, bias, mask, seed)
    codec.check((*(x.shape[i] for i in axes), x.shape[feature]), x.dtype)

    def forward(
        x: Array, scale: Array | None, bias: Array | None, mask: Array | None, seed: Seed
    ) -> tuple[tuple[Array, Array, Array], typing.Any]:
        x, code = residuals.keep(x, codec.encode(jnp.moveaxis(x, feature, -1), seed), codec)
        mean, var = statistics(x, mask)
        y = normalize(x, mean, clip(var), scale, bias)
        return (y, mean, clip(var)), (code, residuals.name((mean, var), codec), scale, bias, mask)

    def backward(
        saved: typing.Any, cotangents: tuple[Array, Array, Array]
    ) -> tuple[Array | None, ...]:
        code, (mean, var), scale, bias, mask = saved
        dy, dmean, dvar = cotangents
        x = residuals.decode_after(jnp.moveaxis(dy, feature, -1), code, codec)
        x = jnp.moveaxis(x, -1, feature)
        clipped, transpose_clip = jax.vjp(clip, var)
        _, transpose = jax.vjp(normalize, x, mean, clipped, scale, bias)
        dx, dmean_y, dvar_y, dscale, dbias = transpose(dy)

        def centred(x: Array) -> Stats:  # mean and variance, differentiable at fixed statistics
            x = x.astype(jnp.float32)
            square = lax.square(x - jnp.expand_dims(mean, axes))
            mean_x, var_x = average((x.mean(axes, where=mask), square.mean(axes, where=mask)))
            return mean_x, var_x

        _, transpose = jax.vjp(centred, x)
        (dx_statistics,) = transpose((dmean + dmean_y, *transpose_clip(dvar + dvar_y)))
        return dx + dx_statistics, dscale, dbias, None, None

    op = jax.custom_vjp(stock)
    op.defvjp(forward, backward)
    return op(x, scale, bias, mask, seed)


def _pmean(
    means: tuple[Array, ...], axis_name: str | None, axis_index_groups: typing.Any
) -> tuple[Array, ...]:
    if axis_name is None:
        return means
    return tuple(lax.pmean(jnp.stack(means), axis_name, axis_index_groups=axis_index_groups))
