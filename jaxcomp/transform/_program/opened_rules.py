"""Backward rules of users' `jax.custom_vjp` functions as linear programs from tangents to tangents.

What such a program reads besides tangents is encoded like any coefficient. A rule that stays one
equation may do anything with what it reads, which is therefore kept exactly.
"""

import functools
from collections.abc import Callable, Collection, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxcomp._core.custom_derivative import without_undivided
from jaxcomp.transform._program.builder import flat
from jaxcomp.transform._program.primitives import (
    HEAVY,
    MOVES,
    NONLINEAR,
    SUMS,
    rounds_coarsely,
    tangents_of,
)
from jaxcomp.transform._program.program import Program, avals, variables
from jaxcomp.transform._program.types import Atom, Constant, Equation, Variable, is_variable

_OF_FIRST = (MOVES - {"stop_gradient"}) | {"div", "dynamic_slice", "reduce_sum", "pad"}
_OF_ONE = HEAVY | {"mul"}

Pull = Callable[[Sequence[Array], Sequence[Array]], list[Array]]


def opened(
    rule: Equation, moving: Sequence[Variable], pushed: Sequence[Variable], pull: Pull
) -> Program | None:
    """Returns the equations of a rule: what it makes of residuals, and a linear program.

    The rule is from cotangents to cotangents. Its transpose is from tangents to tangents, and has
    the same products.

    Args:
        rule: Equation of a linear program, from residuals and tangents to tangents.
        moving: Its operands that are tangents.
        pushed: Its results that are tangents; integers have none.
        pull: From its other operands, and the cotangents of `pushed`, to those of `moving`.

    Returns:
        A program of its operands, each once. None if it is not linear as far as its equations
        tell; so are rules that call a kernel, clip cotangents or add to them. None, too, if JAX
        cannot transpose it, or if it makes larger arrays of the residuals than they are, as an
        attention does that computes its scores again.
    """
    operands = variables(rule.invars)
    values = [v for v in operands if v not in moving]
    backward = flat(
        Program.trace(
            lambda *a: pull(a[: len(values)], a[len(values) :]), *avals([*values, *pushed])
        )
    )
    if not _is_linear(backward, backward.arguments[len(values) :]):
        return None

    nothing = jnp.zeros(())  # in the place of a result that nothing reads

    def push(*arguments: Array) -> list[Array]:
        env = dict(zip(operands, arguments, strict=True))
        of_cotangents = functools.partial(backward, *(env[v] for v in values))
        moved = jax.linear_transpose(of_cotangents, *avals(pushed))([env[v] for v in moving])
        result_of = dict(zip(pushed, moved, strict=True))
        return [result_of.get(v, nothing) for v in rule.outvars]

    try:
        program = flat(Program.trace(push, *avals(operands)))
    except NotImplementedError:  # JAX does not transpose a ragged product over a ragged axis
        return None
    argument_of = dict(zip(operands, program.arguments, strict=True))
    moved = tangents_of(program.equations, [argument_of[v] for v in moving])
    read = variables([a for e in program.equations if moved & {*e.outvars} for a in e.invars])
    made = max((v.aval.size for v in read if v not in moved), default=0)
    return program if made <= max((v.aval.size for v in values), default=0) else None


def _is_linear(program: Program, moving: Sequence[Variable]) -> bool:
    """Returns whether results are linear in some arguments, and zero where these are."""
    moved, zeros = {*moving}, set[Variable]()

    def is_zero(atom: Atom) -> bool:
        if isinstance(atom, Constant):
            return not np.any(np.asarray(atom.val))
        return atom in zeros

    for equation in program.equations:
        at = [i for i, a in enumerate(equation.invars) if is_variable(a) and a in moved]
        if not at:
            if equation.primitive.name in MOVES and all(map(is_zero, equation.invars)):
                zeros.update(equation.outvars)
        elif _is_linear_in(equation, at, is_zero):
            moved.update(equation.outvars)
        else:
            return False
    return all(is_zero(a) or (is_variable(a) and a in moved) for a in program.results)


def _is_linear_in(equation: Equation, at: Sequence[int], is_zero: Callable[[Atom], bool]) -> bool:
    """Returns whether an equation is linear in the operands at some positions, taken together."""
    name = equation.primitive.name
    kept = all(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in equation.outvars)
    if equation.effects or not kept or rounds_coarsely(equation):
        return False
    others = [a for i, a in enumerate(equation.invars) if i not in at]
    if name in _OF_ONE:
        return len(at) == 1
    if name in _OF_FIRST:
        return [*at] == [0] and (name != "pad" or all(map(is_zero, others)))
    if name == "select_n":
        return 0 not in at and all(map(is_zero, others[1:]))
    return name in SUMS and all(map(is_zero, others))


def nonlinear_rules(backward: Program, cotangents: Sequence[Variable]) -> list[Equation]:
    """Returns the rules that a backward program calls which are not linear in their cotangents.

    Args:
        backward: A backward program, whose only calls by `undivided` are of users' rules.
        cotangents: Its arguments that are cotangents.
    """
    moved = tangents_of(backward.equations, cotangents)
    rules = [e for e in backward.equations if without_undivided(e) is not e]
    return [rule for rule in rules if _is_nonlinear_in(rule, moved)]


def _is_nonlinear_in(equation: Equation, moved: Collection[Variable]) -> bool:
    """Returns whether an equation is surely nonlinear in some variables, taken together.

    Kernels and loops may be linear. A comparison counts where something is selected or made by it.
    """
    at = [i for i, a in enumerate(equation.invars) if is_variable(a) and a in moved]
    name = equation.primitive.name
    if not at or name in NONLINEAR or rounds_coarsely(equation):
        return bool(at)
    match name:
        case "custom_jvp_call":
            body = flat(Program.of(equation.params["call_jaxpr"]))
            reached = {body.arguments[i] for i in at}
            for step in body.equations:
                if _is_nonlinear_in(step, reached):
                    return True
                if not reached.isdisjoint(variables(step.invars)):
                    reached.update(step.outvars)
            return False
        case "convert_element_type":
            kinds = avals([*variables(equation.invars), *equation.outvars])
            return not all(jnp.issubdtype(kind.dtype, jnp.inexact) for kind in kinds)
        case "select_n":
            return 0 in at
        case "div":
            return 1 in at
    return name in _OF_ONE and len(at) > 1
