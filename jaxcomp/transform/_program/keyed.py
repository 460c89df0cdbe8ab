"""Programs that can be told apart, so that what is decided about equal ones is decided once."""

import dataclasses
from collections.abc import Hashable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr
from jax.extend.linear_util import WrappedFun
from jax.sharding import Mesh

from jaxcomp.transform._program.custom_rules import is_of_jax, rule_of
from jaxcomp.transform._program.origins import module_path
from jaxcomp.transform._program.program import Program
from jaxcomp.transform._program.types import Atom, is_variable


@dataclasses.dataclass(frozen=True)
class Keyed:
    """A program with a key; programs with equal keys are decided about once.

    Keys are equal if equations, name scopes and source lines are.

    Attributes:
        key: What is equal for equal programs, and the rest.
        program: The program. It has no effects, and no constants that it would keep alive.
        rest: What else has to be equal.
    """

    key: Hashable
    program: Program = dataclasses.field(compare=False)
    rest: tuple[Any, ...] = dataclasses.field(compare=False)

    @classmethod
    def of(cls, program: Program, *rest: Hashable) -> "Keyed | None":
        """Returns the program with its key; None where there is no telling.

        There is none if a parameter of an equation is a function, such as the rule of a user's
        `jax.custom_jvp` or `jax.custom_vjp`: it may close over anything.
        """
        if program.jaxpr.effects or program.consts:
            return None
        try:
            key = (
                _key_of_jaxpr(program.jaxpr),
                rest,
                jnp.result_type(float),
            )  # which jax_enable_x64 changes
            hash(key)
        except TypeError:  # raised by `_key`, or of an unhashable parameter
            return None
        return cls(key, program, rest)


def _key(value: Any) -> Any:
    """Returns the key of a program, or of a parameter of an equation, which may hold programs."""
    if isinstance(value, tuple | list):
        return tuple(map(_key, value))
    calls = callable(value) and not isinstance(value, Mesh)  # which is a decorator, too
    if getattr(value, "consts", ()) or calls or isinstance(value, WrappedFun):
        raise TypeError(f"{value}: expected neither constants nor a function")
    jaxpr = getattr(value, "jaxpr", value)
    return _key_of_jaxpr(jaxpr) if isinstance(jaxpr, Jaxpr) else value


def _key_of_jaxpr(jaxpr: Jaxpr) -> Any:
    program = Program(jaxpr)
    arguments = [*program.constants, *program.arguments]
    numbers: dict[Any, int] = {v: i for i, v in enumerate(arguments)}

    def operand(atom: Atom) -> Any:
        if is_variable(atom):
            return numbers[atom]
        return atom.aval, np.asarray(atom.val).tobytes()

    rows = []
    for equation in program.equations:
        operands = tuple(map(operand, equation.invars))
        parameters = dict(equation.params)
        rule = None
        if is_of_jax(equation):
            rule = rule_of(equation)
            del parameters["jvp_jaxpr_fun"]  # which traces it, a new function each time
        named = tuple((name, _key(v)) for name, v in sorted(parameters.items()))
        info = equation.source_info
        where = str(info.name_stack), module_path(equation), info.traceback
        rows.append((equation.primitive, operands, named, rule, where, equation.ctx))
        for value in equation.outvars:
            numbers[value] = len(numbers)
    avals = tuple(v.aval for v in arguments)
    return avals, tuple(rows), tuple(map(operand, program.results))
