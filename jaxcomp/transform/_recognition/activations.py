"""Finds activation functions of `jax.nn` in a program, and gates."""

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Literal
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxcomp.codecs import Codec, Quantize
from jaxcomp.codecs._codec import FLOATS
from jaxcomp.codecs._offload import inner_codec
from jaxcomp.memory._source_line import source_line
from jaxcomp.ops._curves import CURVES, RELU, Curve, leaky_relu
from jaxcomp.policies._value import Value, dtype_name
from jaxcomp.transform._choice.context import Context
from jaxcomp.transform._choice.decisions import codec_in_roles
from jaxcomp.transform._choice.graph import Graph
from jaxcomp.transform._choice.outliers import outliers
from jaxcomp.transform._program.builder import flat
from jaxcomp.transform._program.custom_rules import rule_of
from jaxcomp.transform._program.origins import module_path
from jaxcomp.transform._program.program import Program, avals, variables
from jaxcomp.transform._program.types import Equation, Variable, is_variable
from jaxcomp.transform._recognition.pattern import LAYOUT, Pattern
from jaxcomp.transform._recognition.unit import Activation, CodedActivation, Gate


def activation_of(pattern: Pattern, value: Variable) -> Activation | None:
    """Returns the activation function that alone reads a value.

    It is None if there is none that is known.
    """
    curves = (*CURVES, *_leaky(pattern, value))
    return next((f for c in curves if (f := _as(pattern, value, c)) is not None), None)


def relu_of(pattern: Pattern, value: Variable) -> Activation | None:
    """Returns the ReLU that alone reads a value; None if there is none."""
    reader = pattern.only_reader(value)
    if reader is None or not is_relu(reader):
        return None
    program = pattern.slice([value], reader.outvars)
    return None if program is None else Activation(RELU, program, reader)


def _leaky(pattern: Pattern, value: Variable) -> list[Curve]:
    """Returns the leaky ReLUs of all numbers by which a value is multiplied."""
    products = [e for e in pattern.readers.get(value, []) if e.primitive.name == "mul"]
    numbers = [pattern.constant(a) for e in products for a in e.invars if a is not value]
    rounded = [float(np.asarray(n, value.aval.dtype)) for n in numbers if n is not None]
    return [leaky_relu(slope) for slope in rounded]


def _as(pattern: Pattern, value: Variable, curve: Curve) -> Activation | None:
    shape, dtype = value.aval.shape, value.aval.dtype
    names = _primitives(curve.function, tuple(min(size, 2) for size in shape), dtype)
    equations = _from(pattern, value, len(names))
    if _names(equations) != names:
        return None
    text, rules = _signature(curve.function, shape, dtype)
    last = equations[-1]
    inside = [value, *(e.outvars[0] for e in equations[:-1])]
    own = set(map(id, equations))
    if not pattern.results.isdisjoint(inside):
        return None
    if any(id(e) not in own for v in inside for e in pattern.readers.get(v, [])):
        return None
    program = pattern.slice([value], last.outvars)
    if program is None or _text(program) != text:
        return None
    if None in rules or _rules(program) != rules:
        return None
    return Activation(curve, program, last)


@functools.cache
def _primitives(
    function: Callable[[Array], Array], shape: tuple[int, ...], dtype: DTypeLike
) -> list[str]:
    """Returns the names of a function's equations. Few shapes are traced: names rule most out."""
    program = flat(Program.trace(function, jax.ShapeDtypeStruct(shape, dtype)))
    return _names(_without_constants(program))


@functools.cache
def _signature(
    function: Callable[[Array], Array], shape: tuple[int, ...], dtype: DTypeLike
) -> tuple[str, list[Any]]:
    """Returns a function's equations, and the rules of those that have one."""
    program = flat(Program.trace(function, jax.ShapeDtypeStruct(shape, dtype)))
    return _text(program), _rules(program)


def _text(program: Program) -> str:
    """Returns the equations of a program, with constants in place of what is made of them alone."""
    return str(program.jaxpr.replace(eqns=_without_constants(program)))


def _without_constants(program: Program) -> list[Equation]:
    """Returns the equations, with constants in place of casts and repetitions of them."""
    constants: dict[Any, Literal] = {}
    equations = []
    for equation in program.equations:
        atoms = [constants.get(a, a) if is_variable(a) else a for a in equation.invars]
        (out, *_) = avals(equation.outvars)
        if equation.primitive.name in LAYOUT and isinstance(atoms[0], Literal):
            value = np.asarray(atoms[0].val, out.dtype)
            constants[equation.outvars[0]] = Literal(value, ShapedArray((), out.dtype))
        else:
            equations.append(equation.replace(invars=atoms))
    return equations


def _names(equations: Iterable[Equation]) -> list[str]:
    """Returns the primitives of some equations, in alphabetical order."""
    return sorted(equation.primitive.name for equation in equations)


def _rules(program: Program) -> list[Any]:
    """Returns the rules of the `jax.custom_jvp` functions that a program calls."""
    return [rule_of(e) for e in program.equations if e.primitive.name == "custom_jvp_call"]


def _from(pattern: Pattern, value: Variable, length: int) -> list[Equation]:
    """Returns the first equations that read a value and what is made of it, in order."""
    known, found = {value}, list[Equation]()
    pending = list(pattern.readers.get(value, []))
    while pending and len(found) < length:
        equation = pending.pop(0)
        is_next = len(equation.outvars) == 1 and equation not in found
        others = [v for v in variables(equation.invars) if v not in known]
        if is_next and not any(is_variable(pattern.through(v, *LAYOUT)) for v in others):
            found.append(equation)
            known.update(equation.outvars)
            pending += pattern.readers.get(equation.outvars[0], [])
    return found


def gate_of(equation: Equation, coded: Mapping[Variable, int]) -> Gate | None:
    """Returns the gate that an equation is, if one of its operands is coded; None if it is none.

    Args:
        equation: The equation.
        coded: The feature axis of each coded array.
    """
    if equation.primitive.name != "mul" or not all(map(is_variable, equation.invars)):
        return None
    operands: list[Any] = equation.invars
    for x, factor in (operands, operands[::-1]):
        shape = x.aval.shape
        kept = {0, coded.get(x)}
        of_each_channel = tuple(n if i in kept else 1 for i, n in enumerate(shape))
        fits = len(shape) > 2 and factor.aval.shape == of_each_channel != shape
        if x in coded and fits and factor.aval.dtype == x.aval.dtype:
            return Gate(x, factor, equation)
    return None


def is_relu(equation: Equation) -> bool:
    """Returns whether an equation is `jax.nn.relu`, whose derivative at 0 is 0."""
    if equation.primitive.name != "custom_jvp_call":
        return False
    rule = rule_of(equation)
    return rule is not None and [rule] == _relu_rules() and _is_max_with_0(equation)


@functools.cache
def _relu_rules() -> list[Any]:
    return _rules(flat(Program.trace(jax.nn.relu, 0.0)))


def _is_max_with_0(call: Equation) -> bool:
    steps = flat(Program.of(call.params["call_jaxpr"])).equations
    literals = [a.val for step in steps for a in step.invars if not is_variable(a)]
    return [step.primitive.name for step in steps] == ["max"] and literals == [0]


# What makes no more of weights than a part of them in another dtype or order.
_VIEWS = LAYOUT - {"broadcast_in_dim"} | {
    "dynamic_slice",
    "sharding_constraint",
    "slice",
    "transpose",
}


def coded_activations(
    pattern: Pattern, reached: Collection[Variable], context: Context
) -> Iterator[tuple[CodedActivation, Codec]]:
    """Returns the activation functions that the policy would quantize twice, with their codecs.

    Without a unit, the operand of a product behind the function and the function's derivative have
    a code each, and a gated unit has three. Codes of the arguments serve all of them, if rounding
    is stochastic and of 3 bits or more.

    Args:
        pattern: The program.
        reached: What has a tangent.
        context: The policy, which takes note.
    """
    free = Graph(pattern.program, set(pattern.program.arguments)).free
    large = outliers(pattern.program, context.outliers).held
    for x in [v for v in pattern.readers if v in reached]:
        unit = _unit(pattern, free, x)
        if unit is None or not large.keys().isdisjoint(unit.operands):
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
            iterations=context.iterations,
        )
        codec = codec_in_roles(value, ("operand", "derivative"), _serves, context)
        if codec is not None:
            yield unit, codec


def _unit(pattern: Pattern, free: set[Variable], x: Variable) -> CodedActivation | None:
    """Returns the activation function that alone reads a value, for products alone."""
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
    cast = pattern.only_reader(equation.outvars[0])
    if cast is not None and cast.primitive.name == "convert_element_type":
        equation = cast
    if equation is not activation.equation:
        program = pattern.slice(operands, equation.outvars)
    if free.issuperset(operands):
        return None  # nothing of it has to be saved
    result: Any = equation.outvars[0]
    readers = pattern.readers.get(result, [])
    features = {_feature_axis(pattern, e, result) for e in readers}
    feature = features.pop() if len(features) == 1 else None
    real = dtype_name(result.aval.dtype) in FLOATS
    if feature is None or result in pattern.results or program is None or not real:
        return None
    return CodedActivation(operands, activation.curve, program, equation, readers, feature)


def _feature_axis(pattern: Pattern, equation: Equation, value: Variable) -> int | None:
    """Returns the feature axis of a value that a product or convolution multiplies by weights.

    It is None otherwise.

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


def channel_axis(convolution: Equation) -> int | None:
    """Returns the feature axis of a convolution's input if its code may be read; else None."""
    batch, feature, *spatial = convolution.params["dimension_numbers"].lhs_spec
    plain = convolution.params["batch_group_count"] == 1 and batch == 0
    return int(feature) if plain and spatial == sorted(spatial) else None


def _serves(codec: Codec) -> bool:
    by = inner_codec(codec)
    return isinstance(by, Quantize) and by.unbiased and by.bits > 2
