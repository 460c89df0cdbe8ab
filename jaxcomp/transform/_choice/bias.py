"""What the codes of a norm's values add to the gradient that passes through the norm."""

import math
import statistics

from jaxcomp.codecs import Codec, Quantize
from jaxcomp.codecs._offload import inner_codec

_NORMAL = statistics.NormalDist()


def bias_of_mean(codec: Codec, shape: tuple[int, ...], count: int) -> float | None:
    """Returns the bias of a gradient in which one code is a factor before and after a mean.

    Args:
        codec: Codec of the value.
        shape: Shape of the value.
        count: Elements of the mean.

    Returns:
        The mean variance of the rounding error over that of the value and `count`, for normal
        values; None where it is not known.
    """
    codec = inner_codec(codec)
    if not isinstance(codec, Quantize) or not codec.unbiased:
        return None
    step = expected_range(shape, codec.range_axes(shape)) / (2**codec.bits - 1)
    return step**2 / (12 if codec.rounding == "dither" else 6) / count


def percent(bias: float) -> str:
    """Returns a bias for a note."""
    return f"{100 * bias:.2g}% for normal values, more where some are large"


def expected_range(shape: tuple[int, ...], axes: tuple[int, ...]) -> float:
    """Returns the expected range of normal values along some axes (Blom 1958)."""
    count = math.prod(shape[axis] for axis in axes)
    return 2 * _NORMAL.inv_cdf((max(count, 2) - 0.375) / (max(count, 2) + 0.25))
