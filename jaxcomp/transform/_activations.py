"""Finds activation functions of `jax.nn` in a program, and gates."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from jaxcomp.ops._curves import CURVES, Curve
from jaxcomp.transform._builder import flat
from jaxcomp.transform._one_result import OneResult
from jaxcomp.transform._pattern import Pattern
from jaxcomp.transform._programs import Program, is_variable, variables
from jaxcomp.transform._rewrites import is_of_jax


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
    text, length = _text(curve, value.aval.shape, value.aval.dtype)
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
    called = [e for e in equations if e.primitive.name == "custom_jvp_call"]
    program = pattern.slice([value], last.outvars)
    if program is None or str(program.jaxpr) != text or not all(map(is_of_jax, called)):
        return None
    return Activation(curve, program, last)


@functools.cache
def _text(curve: Curve, shape: tuple[int, ...], dtype: Any) -> tuple[str, int]:
    """A function's equations, and how many there are."""
    jaxpr = flat(jax.make_jaxpr(curve.function)(jax.ShapeDtypeStruct(shape, dtype))).jaxpr
    return str(jaxpr), len(jaxpr.eqns)


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


@functools.cache
def _relu_source() -> str:
    (equation,) = jax.make_jaxpr(jax.nn.relu)(0.0).eqns
    while equation.primitive.name != "custom_jvp_call":
        (equation,) = equation.params["jaxpr"].eqns
    return str(equation.params["call_jaxpr"].jaxpr.debug_info.func_src_info)


def is_relu(equation: JaxprEqn) -> bool:
    """Whether an equation is `jax.nn.relu`, whose derivative at 0 is 0."""
    if equation.primitive.name != "custom_jvp_call":
        return False
    called = equation.params["call_jaxpr"].jaxpr
    return str(called.debug_info.func_src_info) == _relu_source()
