"""Ranges of each channel of each sample in bfloat16, and levels between their ends."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxcomp._core import platforms
from jaxcomp.codecs._codec import channel_axes
from jaxcomp.codecs._rounding import to_bfloat16

T = TypeVar("T")

_SLACK = 2.0**-8  # relative margin that makes rounding to bfloat16 go outward


def extremes(
    x: Array,
    axes: tuple[int, ...] | None = None,
    function: Callable[[Array], Array] = lambda x: x,
) -> tuple[Array, Array]:
    """Returns the smallest and largest value of an increasing function, rounded outward.

    Without `axes` they are of each channel of each sample. The function is only computed at the
    extremes of `x`: what is reduced and read again, too, XLA would write to memory. These are taken
    in the dtype of `x`: XLA for TPUs then takes both where it computes `x`.
    """
    axes = channel_axes(x.ndim) if axes is None else axes
    low, high = (function(end.astype(jnp.float32)) for end in least_and_greatest(x, axes))
    return -outward(-low), outward(high)


def least_and_greatest(x: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """Returns the smallest and largest value along axes, which stay; a NaN makes both NaN.

    Along axes without elements they are infinite.
    """
    low = jnp.min(x, axes, keepdims=True, initial=jnp.inf)
    high = jnp.max(x, axes, keepdims=True, initial=-jnp.inf)
    return with_nans((low, high), x, axes)


def with_nans(extremes: T, x: Array, axes: tuple[int, ...]) -> T:
    """Makes extremes NaN where `x` has one: a library that XLA for CPUs calls drops NaNs.

    There the squares are summed, too: in the same library, in less than half of the time that a
    test for NaN takes. The sum is NaN only if a value is.

    Args:
        extremes: Any pytree of extremes of `x` along `axes`, which stay.
        x: Floating-point array.
        axes: The axes.
    """

    def mark(extremes: T, x: Array) -> T:
        unknown = jnp.isnan(jnp.sum(x * x, axes, keepdims=True))
        return jax.tree.map(lambda a: jnp.where(unknown, jnp.nan, a), extremes)

    return platforms.mark_nans_on_cpu((extremes, x), mark, lambda extremes, x: extremes)


def equidistant(ends: tuple[Array, ...], bits: int) -> tuple[Array, Array]:
    """Returns the lowest of equidistant levels between two ends, and the distance of levels."""
    low, high = (end.astype(jnp.float32) for end in ends)
    return low, (high - low) / (2**bits - 1)


def reciprocal(step: Array) -> Array:
    """Returns the reciprocal of float32 steps, and 1 where a step is 0 or subnormal.

    Elements are multiplied by it: on a GPU a division takes as long as eight products or more.
    """
    usable = ~(step < jnp.finfo(jnp.float32).tiny)  # NaN stays
    return jnp.where(usable, 1 / jnp.where(usable, step, 1.0), 1.0)


def mean_unless_all(h: Array, positive: Array, low: Array) -> Array:
    """Returns the mean of the values that are not positive, or `low` where all are positive.

    Means are of each channel of each sample.
    """
    axes = channel_axes(h.ndim)
    count = (~positive).sum(axes, keepdims=True)
    mean = jnp.where(positive, 0, h).sum(axes, keepdims=True) / jnp.maximum(count, 1)
    return jnp.where(count == 0, low, to_bfloat16(mean))


def outward(high: Array) -> Array:
    """Rounds upper ends to bfloat16, up."""
    return to_bfloat16(high + _SLACK * jnp.abs(high))
