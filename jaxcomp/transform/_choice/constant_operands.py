"""Constants that inner `jax.checkpoint`s read, such as masks, made inside of them."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, Var

from jaxcomp.memory._tracing import CHECKPOINT_PRIMITIVES
from jaxcomp.transform._program.builder import Builder
from jaxcomp.transform._program.constants import constants
from jaxcomp.transform._program.program import Program, variables
from jaxcomp.transform._program.types import Atom, Equation, Renaming, Variable, is_variable


def with_constants_inside(backward: Program, values: Sequence[Atom], forward: Program) -> Program:
    """Returns a backward program whose inner `jax.checkpoint`s make constants that they read.

    They then tell which scores of an attention a mask hides, wherever the mask was made.

    Args:
        backward: The backward program.
        values: The variables of the forward program that are its first arguments, or literals.
        forward: The forward program.
    """
    fixed = constants(forward)
    made_by = {v: e for v, e in forward.made_by.items() if v in fixed}
    pairs = zip(backward.arguments, values, strict=False)
    behind = {
        argument: value for argument, value in pairs if is_variable(value) and value in made_by
    }
    checkpoints = [e for e in backward.equations if e.primitive.name in CHECKPOINT_PRIMITIVES]
    if all(behind.keys().isdisjoint(variables(e.invars)) for e in checkpoints):
        return backward
    builder = Builder()

    def step(equation: Equation, operands: list[Atom]) -> list[Variable]:
        known = {i: behind[v] for i, v in enumerate(operands) if is_variable(v) and v in behind}
        if known and equation.primitive.name in CHECKPOINT_PRIMITIVES:
            inner = equation.params["jaxpr"]
            of = {inner.invars[i]: value for i, value in known.items()}
            program = _made_inside(inner, of, made_by)
            equation = equation.replace(params=equation.params | {"jaxpr": program.jaxpr})
            operands = [v for i, v in enumerate(operands) if i not in known]
        return builder.add(equation, operands)

    arguments = backward.arguments
    results = builder.inline(backward, arguments, step)
    return builder.program(backward, arguments, results)


def _made_inside(inner: Jaxpr, of: dict[Any, Any], made_by: dict[Variable, Equation]) -> Program:
    """Returns a program, some of whose arguments are made in it by equations of another one."""
    builder = Builder()
    env: Renaming = {}

    def make(value: Variable) -> Any:
        if value not in env:
            equation = made_by[value]
            for operand in equation.invars:
                if is_variable(operand):
                    make(operand)
            builder.copy(equation, env)
        return env[value]

    rest = [v for v in inner.invars if v not in of]
    arguments = {v: Var(v.aval) for v in rest} | {v: make(value) for v, value in of.items()}
    results = builder.inline(Program(inner), [arguments[v] for v in inner.invars])
    return builder.program(Program(inner), [arguments[v] for v in rest], results)
