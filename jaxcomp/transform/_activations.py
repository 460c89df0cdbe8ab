"""Finds activation functions of `jax.nn` in a program, and gates."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Literal
from jaxtyping import Array

from jaxcomp.ops._curves import CURVES, Curve
from jaxcomp.transform._builder import flat
from jaxcomp.transform._custom_rules import rule_of
from jaxcomp.transform._one_result import OneResult
from jaxcomp.transform._pattern import Pattern
from jaxcomp.transform._programs import Program, is_variable, variables


@dataclasses.dataclass(frozen=True, eq=False)
class Activation:
    """An activation function of a program.

    Attributes:
        curve: The function of `jax.nn` of which it has the equations.
        program: It as the program has it.
        equation: The equation that makes its result.
    """

    curve: Curve
    program: Program
    equation: JaxprEqn


def activation_of(pattern: Pattern, value: Any) -> Activation | None:
    """The activation function that alone reads a value; None if there is none that is known."""
    return next((f for c in CURVES if (f := _as(pattern, value, c)) is not None), None)


def _as(pattern: Pattern, value: Any, curve: Curve) -> Activation | None:
    text, rules, length = _signature(curve.function, value.aval.shape, value.aval.dtype)
    equations = _from(pattern, value, length)
    if len(equations) != length:
        return None
    last = equations[-1]
    inside = [value, *(e.outvars[0] for e in equations[:-1])]
    own = set(map(id, equations))
    if not pattern.results.isdisjoint(inside):
        return None
    if any(id(e) not in own for v in inside for e in pattern.readers.get(v, [])):
        return None
    program = pattern.slice([value], last.outvars)
    if program is None or str(program.jaxpr) != text:
        return None
    if None in rules or _rules(program) != rules:
        return None
    return Activation(curve, program, last)


@functools.cache
def _signature(
    function: Callable[[Array], Array], shape: tuple[int, ...], dtype: Any
) -> tuple[str, list[Any], int]:
    """A function's equations, the rules of those that have one, and how many there are."""
    program = flat(jax.make_jaxpr(function)(jax.ShapeDtypeStruct(shape, dtype)))
    return str(program.jaxpr), _rules(program), len(program.jaxpr.eqns)


def _rules(program: Program) -> list[Any]:
    """The rules of the `jax.custom_jvp` functions that a program calls."""
    return [rule_of(e) for e in program.jaxpr.eqns if e.primitive.name == "custom_jvp_call"]


def _from(pattern: Pattern, value: Any, length: int) -> list[JaxprEqn]:
    """At most so many equations that read a value and what is made of it, in order."""
    known, found = {value}, list[JaxprEqn]()
    pending = list(pattern.readers.get(value, []))
    while pending and len(found) < length:
        equation = pending.pop(0)
        is_next = len(equation.outvars) == 1 and equation not in found
        if is_next and known.issuperset(variables(equation.invars)):
            found.append(equation)
            known.update(equation.outvars)
            pending += pattern.readers.get(equation.outvars[0], [])
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class Gate(OneResult):
    """A product of a coded array and one factor for each channel of each sample.

    Attributes:
        x: The coded array.
        factor: The factor.
        equation: The equation of the product.
    """

    x: Any
    factor: Any
    equation: JaxprEqn
    kind = "gate"

    @property
    def operands(self) -> list[Any]:
        """The variables that it reads."""
        return [self.x, self.factor]

    @property
    def saved(self) -> list[Any]:
        """Nothing is encoded."""
        return []


def gate_of(equation: JaxprEqn, coded: Mapping[Any, int]) -> Gate | None:
    """The gate that an equation is, if one of its operands is coded; None if it is none.

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


def is_relu(equation: JaxprEqn) -> bool:
    """Whether an equation is `jax.nn.relu`, whose derivative at 0 is 0."""
    if equation.primitive.name != "custom_jvp_call":
        return False
    rule = rule_of(equation)
    return rule is not None and [rule] == _relu_rules() and _is_max_with_0(equation)


@functools.cache
def _relu_rules() -> list[Any]:
    return _rules(flat(jax.make_jaxpr(jax.nn.relu)(0.0)))


def _is_max_with_0(call: JaxprEqn) -> bool:
    steps = flat(call.params["call_jaxpr"]).jaxpr.eqns
    literals = [a.val for step in steps for a in step.invars if isinstance(a, Literal)]
    return [step.primitive.name for step in steps] == ["max"] and literals == [0]
