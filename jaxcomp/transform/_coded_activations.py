"""Finds activation functions whose results only products and convolutions read."""

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

from jax.extend.core import JaxprEqn

from jaxcomp.codecs import Codec, Offload, Quantize
from jaxcomp.codecs._offload import inner_codec
from jaxcomp.memory._source_line import source_line
from jaxcomp.policies._value import Value
from jaxcomp.transform._activations import Activation, activation_of
from jaxcomp.transform._decisions import PolicyLog, codec_in_roles
from jaxcomp.transform._origins import module_path
from jaxcomp.transform._pattern import Pattern


@dataclasses.dataclass(frozen=True, eq=False)
class CodedActivation:
    """An activation function, whose argument has one code for its derivative and its result.

    Attributes:
        x: Its argument.
        activation: The function.
        feature: The feature axis.
    """

    x: Any
    activation: Activation
    feature: int
    kind = "activation"

    @property
    def origin(self) -> JaxprEqn:
        """The equation that makes the result."""
        return self.activation.equation

    equation = origin

    @property
    def operands(self) -> list[Any]:
        """The variable that it reads."""
        return [self.x]

    @property
    def results(self) -> list[Any]:
        """The variable that it makes."""
        return list(self.origin.outvars)

    @property
    def saved(self) -> list[Any]:
        """The variable that has a code."""
        return [self.x]


def coded_activations(
    pattern: Pattern, reached: Collection[Any], log: PolicyLog
) -> Iterator[tuple[CodedActivation, Codec]]:
    """The activation functions that the policy quantizes twice, with their codecs.

    Without a unit, a product's operand and the derivative of the activation function have a code
    each. One code of the argument serves both, if rounding is stochastic and of 3 bits or more.

    Args:
        pattern: The program.
        reached: What has a tangent.
        log: The policy, which takes note.
    """
    for x in [v for v in pattern.readers if v in reached]:
        activation = activation_of(pattern, x)
        if activation is None or activation.curve.piece is not None:
            continue
        (result,) = activation.equation.outvars
        readers = pattern.readers.get(result, [])
        features = [reads_operand(e, result) for e in readers]
        if not features or None in features or result in pattern.results:
            continue
        if not any(v in reached for e in readers for v in e.invars if v is not result):
            continue  # its weights are frozen, and no backward pass reads the result
        value = Value(
            result.aval.shape,
            result.aval.dtype,
            activation.equation.primitive.name,
            source=source_line(activation.equation),
            path=module_path(activation.equation),
            iterations=log.iterations,
        )
        codec = codec_in_roles(value, ("operand", "derivative"), _serves, log)
        if codec is not None:
            (feature,) = {*features} if len({*features}) == 1 else {result.aval.ndim - 1}
            yield CodedActivation(x, activation, feature), codec


def reads_operand(equation: JaxprEqn, value: Any) -> int | None:
    """The feature axis of a value that is one operand of a product or convolution; else None."""
    operands: list[Any] = list(equation.invars)
    if operands.count(value) != 1:
        return None
    if equation.primitive.name == "dot_general":
        contracted = equation.params["dimension_numbers"][0][operands.index(value)]
        return max(contracted, default=value.aval.ndim - 1)
    if equation.primitive.name == "conv_general_dilated" and operands[0] is value:
        batch, feature, *spatial = equation.params["dimension_numbers"].lhs_spec
        plain = equation.params["batch_group_count"] == 1 and batch == 0
        return feature if plain and spatial == sorted(spatial) else None
    return None


def _serves(codec: Codec) -> bool:
    by = inner_codec(codec)
    in_turn = isinstance(codec, Offload) and codec.in_turn
    return isinstance(by, Quantize) and by.unbiased and by.bits > 2 and not in_turn
