"""Finds concatenations of arrays that units encode, before convolutions."""

from collections.abc import Collection, Mapping, Sequence

from jaxcomp.codecs import Codec, Quantize
from jaxcomp.memory._source_line import source_line
from jaxcomp.policies._value import Value
from jaxcomp.transform._choice.context import Context
from jaxcomp.transform._choice.decisions import codec_in_roles
from jaxcomp.transform._program.origins import module_path
from jaxcomp.transform._program.program import avals
from jaxcomp.transform._program.types import Equation, Variable, is_variable
from jaxcomp.transform._recognition.activations import channel_axis
from jaxcomp.transform._recognition.pattern import Pattern
from jaxcomp.transform._recognition.unit import (
    Concatenation,
    Gate,
    NormAct,
    NormCurve,
    Recognized,
)


def concatenations(
    pattern: Pattern, units: Sequence[Recognized], reached: Collection[Variable], context: Context
) -> list[Recognized]:
    """Returns concatenations that convolutions read, with the codec of arrays without a code.

    Without them, a convolution behind the skip connection of a U-Net encodes it again.

    Args:
        pattern: The program.
        units: Its other units.
        reached: What has a tangent.
        context: The policy, which takes note.
    """
    codes = {r.unit.results[0]: r for r in units if _has_code(r)}
    features = {x: _feature(recognized, codes) for x, recognized in codes.items()}
    found = []
    for equation in pattern.program.equations:
        unit = _concatenation(pattern, equation, features, reached)
        if unit is None:
            continue
        codec = _codec(unit, context) if unit.saved else codes[unit.operands[0]].codec
        if codec is not None:
            found.append(Recognized(unit, codec))
    return found


def _has_code(recognized: Recognized) -> bool:
    unit = recognized.unit
    on_host = recognized.codec is not None and recognized.codec.on_host
    is_coded = isinstance(unit, NormAct | NormCurve) and unit.is_coded
    return not on_host and (is_coded or isinstance(unit, Gate))


def _feature(recognized: Recognized, codes: Mapping[Variable, Recognized]) -> int:
    """Returns the feature axis of a result that has a code."""
    unit = recognized.unit
    while isinstance(unit, Gate):
        unit = codes[unit.x].unit
    assert isinstance(unit, NormAct | NormCurve)
    return unit.feature


def _concatenation(
    pattern: Pattern,
    equation: Equation,
    features: Mapping[Variable, int],
    reached: Collection[Variable],
) -> Concatenation | None:
    """Returns the concatenation that an equation is, if one of its operands has a code."""
    if equation.primitive.name != "concatenate":
        return None
    feature = equation.params["dimension"]
    operands = list(filter(is_variable, equation.invars))
    has_code = [features.get(x) == feature for x in operands]
    convolutions = [
        e for e in pattern.readers.get(equation.outvars[0], []) if _reads(e, equation, feature)
    ]
    weights = {v for e in convolutions for v in e.invars[1:] if is_variable(v)}
    distinct = len(set(operands)) == len(equation.invars)
    if not any(has_code) or not distinct or not weights.intersection(reached):
        return None
    rest = [x for x, coded in zip(operands, has_code, strict=True) if not coded]
    return Concatenation(operands, rest, equation, feature)


def _reads(reader: Equation, concatenation: Equation, feature: int) -> bool:
    if reader.primitive.name != "conv_general_dilated":
        return False
    is_operand = reader.invars[0] is concatenation.outvars[0]
    is_whole = reader.params["feature_group_count"] == 1
    return is_operand and is_whole and channel_axis(reader) == feature


def _codec(unit: Concatenation, context: Context) -> Codec | None:
    """Returns the codec that the policy has for all operands without a code."""
    made = unit.equation
    values = [
        Value(
            aval.shape,
            aval.dtype,
            made.primitive.name,
            source=source_line(made),
            path=module_path(made),
            iterations=context.iterations,
        )
        for aval in avals(unit.saved)
    ]
    codecs = {codec_in_roles(value, ("operand",), _serves, context) for value in values}
    return codecs.pop() if len(codecs) == 1 else None


def _serves(codec: Codec) -> bool:
    return isinstance(codec, Quantize)
