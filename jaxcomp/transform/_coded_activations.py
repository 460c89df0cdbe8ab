"""Finds activation functions, and gated ones, whose results only products and convolutions read."""

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

from jax.extend.core import JaxprEqn

from jaxcomp.codecs import Codec, Offload, Quantize
from jaxcomp.codecs._codec import FLOATS
from jaxcomp.codecs._offload import inner_codec
from jaxcomp.memory._source_line import source_line
from jaxcomp.ops._curves import Curve
from jaxcomp.policies._value import Value, dtype_name
from jaxcomp.transform._activations import activation_of
from jaxcomp.transform._decisions import PolicyLog, codec_in_roles
from jaxcomp.transform._graph import Graph
from jaxcomp.transform._one_result import OneResult
from jaxcomp.transform._origins import module_path
from jaxcomp.transform._pattern import LAYOUT, Pattern
from jaxcomp.transform._programs import Program, is_variable

# What makes no more of weights than a part of them in another dtype or order.
_VIEWS = LAYOUT - {"broadcast_in_dim"} | {
    "dynamic_slice",
    "sharding_constraint",
    "slice",
    "transpose",
}


@dataclasses.dataclass(frozen=True, eq=False)
class CodedActivation(OneResult):
    """An activation function, or its product with another value, as in a gated linear unit.

    Its operands have one code each, which serve the derivatives and what reads the result.

    Attributes:
        operands: The argument of the function, and the other value if there is one.
        curve: The function.
        program: From the operands to the result.
        equation: The equation that makes the result.
        readers: The products and convolutions that read it.
        feature: The feature axis.
    """

    operands: list[Any]
    curve: Curve
    program: Program
    equation: JaxprEqn
    readers: list[JaxprEqn]
    feature: int
    kind = "activation"

    @property
    def saved(self) -> list[Any]:
        """The variables that have a code."""
        return self.operands


def coded_activations(
    pattern: Pattern, reached: Collection[Any], log: PolicyLog
) -> Iterator[tuple[CodedActivation, Codec]]:
    """The activation functions that the policy would quantize twice, with their codecs.

    Without a unit, the operand of a product behind the function and the function's derivative have
    a code each, and a gated unit has three. Codes of the arguments serve all of them, if rounding
    is stochastic and of 3 bits or more.

    Args:
        pattern: The program.
        reached: What has a tangent.
        log: The policy, which takes note.
    """
    free = Graph(pattern.jaxpr, set(pattern.jaxpr.invars)).free
    for x in [v for v in pattern.readers if v in reached]:
        unit = _unit(pattern, free, x)
        if unit is None:
            continue
        result: Any = unit.results[0]
        weights = {v for e in unit.readers for v in e.invars if v is not result}
        if weights.isdisjoint(reached):
            continue  # they are frozen, and no backward pass reads the result
        value = Value(
            result.aval.shape,
            result.aval.dtype,
            unit.equation.primitive.name,
            source=source_line(unit.equation),
            path=module_path(unit.equation),
            iterations=log.iterations,
        )
        codec = codec_in_roles(value, ("operand", "derivative"), _serves, log)
        if codec is not None:
            yield unit, codec


def _unit(pattern: Pattern, free: set[Any], x: Any) -> CodedActivation | None:
    """The activation function that alone reads a value, with what only products read of it."""
    if x.aval.ndim < 2 or dtype_name(x.aval.dtype) not in FLOATS:
        return None
    activation = activation_of(pattern, x)
    if activation is None or activation.curve.piece is not None:
        return None
    operands = [x]
    program: Program | None = activation.program
    equation = activation.equation
    gate = pattern.only_reader(equation.outvars[0])
    if gate is not None and gate.primitive.name == "mul":
        factors: list[Any] = [v for v in gate.invars if v is not equation.outvars[0]]
        (factor,) = factors or [x]
        if not is_variable(factor) or factor is x or factor.aval != x.aval:
            return None
        operands, equation = [x, factor], gate
        program = pattern.slice(operands, gate.outvars)
    if free.issuperset(operands):
        return None  # nothing of it has to be saved
    result: Any = equation.outvars[0]
    readers = pattern.readers.get(result, [])
    features = {_feature_axis(pattern, e, result) for e in readers}
    feature = features.pop() if len(features) == 1 else None
    if feature is None or result in pattern.results or program is None:
        return None
    return CodedActivation(operands, activation.curve, program, equation, readers, feature)


def _feature_axis(pattern: Pattern, equation: JaxprEqn, value: Any) -> int | None:
    """The feature axis of a value that a product or convolution multiplies by weights; else None.

    Weights are an argument or a view of one. A unit's product saves them exactly, which is free.
    """
    operands: list[Any] = list(equation.invars)
    if equation.primitive.name not in ("dot_general", "conv_general_dilated"):
        return None
    others = [a for a in operands if a is not value]
    if len(others) != 1 or pattern.through(others[0], *_VIEWS) in pattern.made_by:
        return None
    if equation.primitive.name == "dot_general":
        contracted = equation.params["dimension_numbers"][0][operands.index(value)]
        return int(max(contracted, default=value.aval.ndim - 1))
    return channel_axis(equation) if operands[0] is value else None


def channel_axis(convolution: JaxprEqn) -> int | None:
    """The feature axis of a convolution's input if its code may be read; else None."""
    batch, feature, *spatial = convolution.params["dimension_numbers"].lhs_spec
    plain = convolution.params["batch_group_count"] == 1 and batch == 0
    return int(feature) if plain and spatial == sorted(spatial) else None


def _serves(codec: Codec) -> bool:
    by = inner_codec(codec)
    in_turn = isinstance(codec, Offload) and codec.in_turn
    return isinstance(by, Quantize) and by.unbiased and by.bits > 2 and not in_turn
