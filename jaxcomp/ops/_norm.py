"""Normalisation with a compressed saved input."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxcomp._core import barriers
from jaxcomp._core.shard_map import match_varying, varying_axes
from jaxcomp.codecs import Codec
from jaxcomp.codecs._codec import Seed
from jaxcomp.ops._sensitivity import Sink, check_sink, importance, sensitivity

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
    axis_index_groups: Any = None,
    mask: Array | None = None,
    codec: Codec | None = None,
    seed: Seed = None,
    sink: Sink | None = None,
) -> tuple[Float[Array, "..."], Float[Array, " features"], Float[Array, " features"]]:
    """Normalises over the batch and saves `x` encoded.

    Results are bit-identical to those of `flax.nnx.BatchNorm` in training. Mean and variance are
    saved exactly. The backward pass applies the exact rule, with these statistics, to the decoded
    `x`.

    The gradient of `x` is biased, because the normalised value occurs twice in it. Relative to the
    cotangent, the bias is the variance of the quantization error (in units of the batch's variance)
    divided by the number of values per feature. It weighs more where the gradient is much smaller
    than the cotangent, as in sums over the gradient.

    The codec sees the features last. It also sees values that `mask` excludes: fill them with a
    value within the range of the others.

    Args:
        x: float32, bfloat16 or float16 activations; axis 0 is the batch.
        scale: Factor of the normalised values, or None.
        bias: Offset of the scaled values, or None.
        axis: The feature axis. Statistics are taken over all other axes.
        epsilon: Constant added to the variance.
        use_fast_variance: Whether the variance is computed as E[x^2] - E[x]^2, in one pass.
        axis_name: Mesh or `vmap` axis over which statistics are averaged too. For a `vmap` axis,
            the gradient must be taken inside of the `vmap`, because JAX runs a custom backward rule
            outside of it without the name.
        axis_index_groups: Groups of indices within that axis, as in `jax.lax.pmean`.
        mask: Boolean array that broadcasts to `x`; True where a value counts for the statistics.
        codec: Codec of `x`. None leaves differentiation to JAX.
        seed: Integer scalar that selects the rounding noise of the codec.
        sink: Argument whose gradient is the sensitivity of each sample (`ops.Sink`). Ignored
            without a codec.

    Returns:
        The normalised array in the promoted dtype of `x`, `scale` and `bias`; the batch's mean and
        its (biased) variance, both float32.

    Raises:
        TypeError: If the codec cannot store the dtype of `x`.
        ValueError: If `x` has no axis `axis`, or the codec cannot store its shape.

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
    norm = Norm(axes, axes, epsilon, use_fast_variance, axis_name, axis_index_groups)
    return _coded(norm, feature, x, scale, bias, mask, codec, seed, sink)


def layer_norm(
    x: Float[Array, "*batch features"],
    scale: Float[Array, " features"] | None,
    bias: Float[Array, " features"] | None,
    *,
    epsilon: float = 1e-6,
    use_fast_variance: bool = True,
    axis_name: str | None = None,
    axis_index_groups: Any = None,
    mask: Array | None = None,
    codec: Codec | None = None,
    seed: Seed = None,
    sink: Sink | None = None,
) -> Float[Array, "*batch features"]:
    """Normalises over the last axis and saves `x` encoded.

    The result is bit-identical to that of `flax.nnx.LayerNorm`. Mean and variance of each token are
    saved exactly, in float32. The backward pass applies the exact rule, with these statistics, to
    the decoded `x`. The gradient of `x` is biased as in `batch_norm`. Relative to the cotangent,
    the bias is the variance of the quantization error (in units of the token's variance) divided by
    the number of features.

    Args:
        x: float32, bfloat16 or float16 activations; axis 0 is the batch.
        scale: Factor of the normalised values, or None.
        bias: Offset of the scaled values, or None.
        epsilon: Constant added to the variance.
        use_fast_variance: Whether the variance is computed as E[x^2] - E[x]^2, in one pass.
        axis_name: Mesh or `vmap` axis over which statistics are averaged too, as in `batch_norm`.
        axis_index_groups: Groups of indices within that axis, as in `jax.lax.pmean`.
        mask: Boolean array that broadcasts to `x`; True where a value counts for the statistics.
        codec: Codec of `x`. None leaves differentiation to JAX.
        seed: Integer scalar that selects the rounding noise of the codec.
        sink: Argument whose gradient is the sensitivity of each sample (`ops.Sink`). Ignored
            without a codec.

    Returns:
        The normalised array in the promoted dtype of `x`, `scale` and `bias`.

    Raises:
        TypeError: If the codec cannot store the dtype of `x`.
        ValueError: If the codec cannot store the shape of `x`.

    Example:
        >>> from jaxcomp import Quantize
        >>> x = jnp.array([[0.0, 2.0]])
        >>> layer_norm(x, None, None, codec=Quantize(bits=4)).round(2).tolist()
        [[-1.0, 1.0]]
    """
    last = x.ndim - 1
    others = tuple(range(last))
    norm = Norm((last,), others, epsilon, use_fast_variance, axis_name, axis_index_groups)
    return _coded(norm, last, x, scale, bias, mask, codec, seed, sink)[0]


def _coded(
    norm: "Norm",
    feature: int,
    x: Array,
    scale: Array | None,
    bias: Array | None,
    mask: Array | None,
    codec: Codec | None,
    seed: Seed,
    sink: Sink | None,
) -> tuple[Array, Array, Array]:
    """Returns the normalised array, mean and variance; saves `x` with its feature axis last."""
    axes = norm.axes

    def stock(
        x: Array,
        scale: Array | None,
        bias: Array | None,
        mask: Array | None,
        sink: Sink | None,
        seed: Seed,
    ) -> tuple[Array, Array, Array]:
        mean, var = norm.statistics(x, mask)
        return norm.normalize(x, mean, norm.clip(var), scale, bias), mean, norm.clip(var)

    if codec is None:
        return stock(x, scale, bias, mask, sink, seed)
    codec.check((*x.shape[:feature], *x.shape[feature + 1 :], x.shape[feature]), x.dtype)
    check_sink(sink, x.shape)
    x, scale, bias, mask, sink, seed = match_varying((x, scale, bias, mask, sink, seed))

    def forward(
        x: Array,
        scale: Array | None,
        bias: Array | None,
        mask: Array | None,
        sink: Sink | None,
        seed: Seed,
    ) -> tuple[tuple[Array, Array, Array], Any]:
        coded = codec.encode(jnp.moveaxis(x, feature, -1), seed, importance(sink))
        x, code = barriers.save_residual(x, coded, codec)
        mean, var = norm.statistics(x, mask)
        y = norm.normalize(x, mean, norm.clip(var), scale, bias)
        kept = barriers.name_residual((mean, var), codec)
        return (y, mean, norm.clip(var)), (code, kept, scale, bias, mask)

    def backward(saved: Any, cotangents: tuple[Array, Array, Array]) -> tuple[Array | None, ...]:
        code, (mean, var), scale, bias, mask = saved
        dy, dmean, dvar = cotangents
        x = barriers.decode_after(jnp.moveaxis(dy, feature, -1), code, codec.decode)
        x = jnp.moveaxis(x, -1, feature)
        dsink = None if sink is None else norm_sensitivity(x, dy, var)
        clipped, transpose_clip = jax.vjp(norm.clip, var)
        _, transpose = jax.vjp(norm.normalize, x, mean, clipped, scale, bias)
        dx, dmean_y, dvar_y, dscale, dbias = transpose(dy)

        def centred(x: Array) -> Stats:  # mean and variance around the fixed mean
            x = x.astype(jnp.float32)
            square = lax.square(x - jnp.expand_dims(mean, axes))
            mean_x, var_x = norm.average((x.mean(axes, where=mask), square.mean(axes, where=mask)))
            return mean_x, var_x

        _, transpose = jax.vjp(centred, x)
        (dx_statistics,) = transpose((dmean + dmean_y, *transpose_clip(dvar + dvar_y)))
        return dx + dx_statistics, dscale, dbias, None, dsink, None

    def norm_sensitivity(x: Array, dy: Array, var: Array) -> Sink:
        factor = lax.rsqrt(jnp.expand_dims(norm.clip(var), axes) + norm.epsilon)
        h, dy = (jnp.moveaxis(a, feature, -1) for a in (x * factor, dy))
        return sensitivity(h, dy, 1 / h.shape[-1])

    op = jax.custom_vjp(stock)
    op.defvjp(forward, backward)
    return op(x, scale, bias, mask, sink, seed)


@dataclasses.dataclass(frozen=True)
class Norm:
    """Normalisation with the formulas of Flax.

    Attributes:
        axes: Axes over which statistics are taken.
        scaled: Axes along which scale and bias are constant.
        epsilon: Constant added to the variance.
        use_fast_variance: Whether the variance is computed as E[x^2] - E[x]^2, in one pass.
        axis_name: Mesh or `vmap` axis over which statistics are averaged too.
        axis_index_groups: Groups of indices within that axis, as in `jax.lax.pmean`.
    """

    axes: tuple[int, ...]
    scaled: tuple[int, ...]
    epsilon: float
    use_fast_variance: bool
    axis_name: str | None = None
    axis_index_groups: Any = None

    def statistics(self, x: Array, mask: Array | None = None) -> Stats:
        """Returns the mean and the variance in float32, before `clip`."""
        x = x.astype(jnp.float32)
        if self.use_fast_variance:
            means = x.mean(self.axes, where=mask), lax.square(x).mean(self.axes, where=mask)
            mean, square = self.average(means)
            return mean, square - lax.square(mean)
        (mean,) = self.average((x.mean(self.axes, where=mask),))
        square = lax.square(x - jnp.expand_dims(mean, self.axes))
        (var,) = self.average((square.mean(self.axes, where=mask),))
        return mean, var

    def clip(self, var: Array) -> Array:
        """Returns the variance with negative values set to 0, which E[x^2] - E[x]^2 may produce."""
        return jnp.maximum(0.0, var) if self.use_fast_variance else var

    def normalize(
        self, x: Array, mean: Array, var: Array, scale: Array | None, bias: Array | None
    ) -> Array:
        """Returns the normalised array in the promoted dtype of `x`, `scale` and `bias`."""
        dtype = jnp.result_type(*(a for a in (x, scale, bias) if a is not None))
        x = x - jnp.expand_dims(mean, self.axes)
        factor = lax.rsqrt(jnp.expand_dims(var, self.axes) + self.epsilon)
        if scale is not None:
            factor *= jnp.expand_dims(scale, self.scaled)
        x *= factor
        if bias is not None:
            x += jnp.expand_dims(bias, self.scaled)
        return x.astype(dtype)

    def standardize(self, x: Array, mean: Array, var: Array) -> Array:
        """Returns the normalised array in float32, without scale and bias."""
        centred, factor = self.centre(x, mean, var)
        return centred * factor

    def centre(self, x: Array, mean: Array, var: Array) -> tuple[Array, Array]:
        """Returns two arrays in float32 whose product is the normalised array.

        They are the array without its mean, and a factor of each feature.
        """
        return x.astype(jnp.float32) - self.wide(mean), lax.rsqrt(self.wide(var) + self.epsilon)

    def wide(self, channels: Array) -> Array:
        """Returns one float32 value per feature in a shape that broadcasts to the array."""
        return jnp.expand_dims(channels.astype(jnp.float32), self.scaled)

    def shares(self, cotangents: tuple[Array, ...], x: Array) -> tuple[Array, ...]:
        """Returns this device's share of the cotangents of statistics, for `average`."""
        return shares(cotangents, x, self.axis_name)

    def average(self, means: tuple[Array, ...]) -> tuple[Array, ...]:
        """Averages means over the named axis."""
        return average(means, self.axis_name, self.axis_index_groups)


def shares(cotangents: tuple[Array, ...], x: Array, axis_name: str | None) -> tuple[Array, ...]:
    """Returns this device's share of the cotangents of statistics, for `average` to average.

    A cotangent that does not vary over the devices by its type is the sum over all devices. It is
    divided by their number.
    """
    if axis_name is None or axis_name not in varying_axes(x):
        return cotangents
    size = lax.axis_size(axis_name)
    return tuple(c if axis_name in varying_axes(c) else c / size for c in cotangents)


def average(
    means: tuple[Array, ...], axis_name: str | None, axis_index_groups: Any
) -> tuple[Array, ...]:
    """Averages means of one shape over a named axis, if there is one."""
    if axis_name is None:
        return means
    stacked = jnp.stack(means)
    return tuple(lax.pmean(stacked, axis_name, axis_index_groups=axis_index_groups))
