"""What the codes of a norm's values add to the gradient that passes through the norm."""

import dataclasses
import math
import statistics

from jaxcomp.codecs import Codec, Quantize, SignAware
from jaxcomp.codecs._codec import channel_axes
from jaxcomp.codecs._offload import inner_codec
from jaxcomp.transform._units import NormAct

_NORMAL = statistics.NormalDist()


def bias_of_mean(codec: Codec, shape: tuple[int, ...], count: int) -> float | None:
    """The bias of a gradient in which one code is a factor before and after a mean.

    Args:
        codec: Codec of the value.
        shape: Shape of the value.
        count: Elements of the mean.

    Returns:
        The mean variance of the rounding error over that of the value and `count`, for normal
        values; None where it is not known.
    """
    codec = inner_codec(codec)
    if not isinstance(codec, Quantize) or codec.rounding != "stochastic":
        return None
    step = _range(shape, codec.range_axes(shape)) / (2**codec.bits - 1)
    return step**2 / 6 / count


def bias_of_norm(unit: NormAct, codec: Codec) -> float:
    """The bias of the gradient of a batch norm's input, for normal values, as `bias_of_mean`."""
    sign_aware = inner_codec(codec)
    assert isinstance(sign_aware, SignAware)
    shape = unit.norms[0].x.aval.shape
    count = positions(unit)
    if unit.activation is not None:
        step = _range(shape, channel_axes(len(shape))) / (2**sign_aware.bits - 1)
        return step**2 / 12 / count  # subtractive dither
    signed = unit.relu and len(unit.norms) == 1 and unit.residual is None and unit.pool is None
    return dataclasses.replace(sign_aware, signed=signed).normal_variance / count


def positions(unit: NormAct) -> int:
    """How many values of a device a batch norm takes its mean over."""
    shape = unit.norms[0].x.aval.shape
    return math.prod(shape) // shape[unit.feature] if math.prod(shape) else 1


def percent(bias: float) -> str:
    """A bias for a note."""
    return f"{100 * bias:.2g}% for normal values, more where some are large"


def _range(shape: tuple[int, ...], axes: tuple[int, ...]) -> float:
    """The expected range of normal values along some axes (Blom 1958)."""
    count = math.prod(shape[axis] for axis in axes)
    return 2 * _NORMAL.inv_cdf((max(count, 2) - 0.375) / (max(count, 2) + 0.25))
