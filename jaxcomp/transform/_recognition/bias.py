"""What the codes of a norm's values add to the gradient that passes through the norm."""

import dataclasses
import math

from jaxcomp.codecs import Codec, SignAware
from jaxcomp.codecs._codec import channel_axes
from jaxcomp.codecs._offload import inner_codec
from jaxcomp.transform._choice.bias import expected_range
from jaxcomp.transform._recognition.unit import NormAct, NormCurve


def bias_of_norm(unit: NormAct | NormCurve, codec: Codec) -> float:
    """Returns the bias of the gradient of a norm's input, for normal values."""
    sign_aware = inner_codec(codec)
    assert isinstance(sign_aware, SignAware)
    count = positions(unit)
    if isinstance(unit, NormCurve):
        shape = unit.norm.x.aval.shape
        step = expected_range(shape, channel_axes(len(shape))) / (2**sign_aware.bits - 1)
        return step**2 / 12 / count  # subtractive dither
    signed = unit.relu and len(unit.norms) == 1 and unit.residual is None and unit.pool is None
    return dataclasses.replace(sign_aware, signed=signed).normal_variance / count


def positions(unit: NormAct | NormCurve) -> int:
    """Returns how many values of a device a norm takes each mean over."""
    if isinstance(unit, NormCurve):
        return unit.norm.norm.groups.count
    shape = unit.norms[0].x.aval.shape
    return math.prod(shape) // shape[unit.feature] if math.prod(shape) else 1
