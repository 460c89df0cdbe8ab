"""A function's program beside that of its derivative."""

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import DropVar
from jax.extend.source_info_util import NameStack
from jaxtyping import Array

from jaxcomp._core.custom_derivative import undivided
from jaxcomp._core.shard_map import filled
from jaxcomp.transform._program.builder import Builder, key_of_step, renamed
from jaxcomp.transform._program.custom_rules import is_rule_of_user
from jaxcomp.transform._program.opened_rules import opened
from jaxcomp.transform._program.primitives import tangents_of
from jaxcomp.transform._program.program import (
    Program,
    apply,
    avals,
    is_reference,
    needed,
    read,
    variables,
)
from jaxcomp.transform._program.replaced import are_replaced
from jaxcomp.transform._program.types import Atom, Equation, Renaming, Variable, is_variable


@dataclasses.dataclass(frozen=True)
class Linearized:
    """A function's forward program, and its derivative at a point as a linear program.

    Attributes:
        forward: From the function's arguments to its results and, after them, the coefficients.
        linear: From the coefficients and, after them, the tangents of the arguments that are
            differentiated, to the tangents of the results that are.
        results: Number of the function's results.
        active: The arguments that are differentiated.
        smooth: The results that have a tangent.
        opened: Whether it has the equations of a user's rule in place of the rule.
    """

    forward: Program
    linear: Program
    results: int
    active: tuple[int, ...]
    smooth: tuple[int, ...]
    opened: bool = False

    @property
    def coefficients(self) -> list[Any]:
        """The variables of the forward program that are the linear one's coefficients."""
        count = len(self.linear.arguments) - len(self.active)
        return self.forward.results[self.results :][:count]


def linearize(program: Program, active: Sequence[int], *, opens: bool = False) -> Linearized:
    """Takes the derivative of a flat program with respect to some of its arguments.

    Every coefficient of the linear program is computed in the forward one, at the exact values.
    Both consist of the derivatives of the equations. JAX takes that of equal equations once.

    Args:
        program: The program.
        active: The arguments.
        opens: Whether the rule of a user's `jax.custom_vjp` becomes equations where `opened` can
            make it so. Otherwise each is one equation, as it is while a library replaces functions
            of JAX: that is for the user's calls alone.

    Returns:
        The derivative.

    Raises:
        NotImplementedError: If the function makes or differentiates references, or has numbers of
            64 bits that only `jax.enable_x64` inside of it allows.
    """
    _check_precision(program)
    arguments = program.arguments
    tangents = [Variable(arguments[i].aval) for i in active]
    _check_no_references([*tangents, *program.made_by])
    builder = _Split(tangents, opens)
    env = builder.constants_of(program) | {v: v for v in arguments}
    tangent_of: Renaming = {arguments[i]: v for i, v in zip(active, tangents, strict=True)}
    for equation in program.equations:
        operands, results = variables(equation.invars), variables(equation.outvars)
        moving = [v for v in operands if v in tangent_of]
        if not moving:
            builder.copy(equation, env)
            continue
        _check_no_references(operands)
        values = builder.trace(
            functools.partial(_derivative, equation, moving),
            renamed(env, operands),
            renamed(tangent_of, moving),
            at=equation,
            key=_key(equation, moving),
        )
        env.update(zip(results, values, strict=False))
        pairs = zip(filter(_is_smooth, results), values[len(results) :], strict=True)
        tangent_of |= {v: t for v, t in pairs if is_variable(t) and t in builder.tangents}
    smooth = [i for i, v in enumerate(program.results) if _is_smooth(v)]
    moved = [_tangent(builder.linear, tangent_of, program.results[i]) for i in smooth]
    linear = builder.linear_program(program, tangents, moved)
    coefficients = linear.arguments[: len(linear.arguments) - len(tangents)]
    values = renamed(env, program.results)
    forward = builder.program(program, arguments, [*values, *coefficients])
    return Linearized(
        forward, linear, len(program.results), tuple(active), tuple(smooth), builder.opened
    )


class _Split(Builder):
    """Builds a program, and a linear one of the equations that read tangents."""

    def __init__(self, tangents: Sequence[Variable], opens: bool) -> None:
        super().__init__()
        self.linear = Builder()
        self.tangents: set[Variable] = set(tangents)
        self.opened = False
        self._opens = opens
        self._of_rules: dict[Hashable, Program | None] = {}

    def add(self, equation: Equation, operands: Sequence[Atom]) -> Sequence[Atom]:
        """Adds an equation to one of the programs, or what a user's rule consists of to both."""
        if self.tangents.isdisjoint(variables(operands)):
            return super().add(equation, operands)
        if self._opens and is_rule_of_user(equation) and not self._are_replaced:
            pairs = zip(equation.invars, operands, strict=True)
            given = {v: operand for v, operand in pairs if is_variable(v)}
            moving = [v for v, a in given.items() if is_variable(a) and a in self.tangents]
            if rule := self._rule(equation, moving):
                self.opened = True
                return self.inline(rule, [*given.values()])
        results = self.linear.add(equation, operands)
        self.tangents.update(variables(results))
        return results

    def _rule(self, equation: Equation, moving: Sequence[Variable]) -> Program | None:
        """Returns what a user's rule consists of, as `opened`; once for equal rules."""
        key = _key(equation, moving)
        if key is None or key not in self._of_rules:
            results = [v for v in equation.outvars if not isinstance(v, DropVar)]
            pushed = [v for v in results if _is_smooth(v)]
            pull = functools.partial(_transposed, equation, moving, pushed)
            self._of_rules[key] = opened(equation, moving, pushed, pull)
        return self._of_rules[key]

    @functools.cached_property
    def _are_replaced(self) -> bool:
        return are_replaced()

    def linear_program(
        self, like: Program, tangents: Sequence[Variable], results: Sequence[Atom]
    ) -> Program:
        """Returns the linear program, whose first arguments are the coefficients."""
        jaxpr = self.linear.program(like, tangents, results).jaxpr
        equations = needed(Program(jaxpr).equations, results)
        defined = {*tangents, *(v for e in equations for v in e.outvars)}
        read = variables([*(atom for e in equations for atom in e.invars), *results])
        arguments = [*(v for v in read if v not in defined), *tangents]
        _check_no_references([*arguments, *defined])
        effects = {effect for e in equations for effect in e.effects}
        return Program(jaxpr.replace(invars=arguments, eqns=equations, effects=effects))


def _tangent(linear: Builder, tangent_of: Renaming, result: Atom) -> Atom:
    """Returns the tangent of a result, which is zero where it depends on no argument's."""
    if is_variable(result) and result in tangent_of:
        return tangent_of[result]
    (zero,) = linear.trace(lambda: [filled(result.aval, 0.0)])
    return zero


def _derivative(
    equation: Equation,
    moving: Sequence[Variable],
    values: Sequence[Array],
    tangents: Sequence[Array],
) -> list[Array]:
    """Returns the results of an equation, and the tangents of those that have one."""
    operands = variables(equation.invars)

    def at(*moved: Array) -> tuple[list[Array], list[Array]]:
        env = dict(zip((*operands, *moving), (*values, *moved), strict=True))
        outputs = apply(_unplaced(equation), [read(env, atom) for atom in equation.invars])
        pairs = zip(equation.outvars, outputs, strict=True)
        results = [(v, value) for v, value in pairs if not isinstance(v, DropVar)]
        return [value for v, value in results if _is_smooth(v)], [value for _, value in results]

    chosen = [values[operands.index(v)] for v in moving]
    _, move, results = jax.linearize(at, *chosen, has_aux=True)
    return [*results, *move(*tangents)]


def _key(equation: Equation, moving: Sequence[Variable]) -> Hashable | None:
    """Returns what is equal for equations of equal derivatives by some of their operands."""
    equal, moves = key_of_step(equation), [v in moving for v in variables(equation.invars)]
    dropped = [isinstance(v, DropVar) for v in equation.outvars]
    return equal and (equal, tuple(moves), tuple(dropped))


def _unplaced(equation: Equation) -> Equation:
    """Returns an equation without its name scope."""
    return equation.replace(source_info=equation.source_info.replace(name_stack=NameStack()))


def _is_smooth(atom: Atom) -> bool:
    return jnp.issubdtype(atom.aval.dtype, jnp.inexact)


def _check_precision(program: Program) -> None:
    """Raises a NotImplementedError if a float of 64 bits is none where the function is called."""
    wide = [v.aval for v in program.made_by if v.aval.dtype in (jnp.float64, jnp.complex128)]
    if wide and jax.dtypes.canonicalize_dtype(jnp.float64) != jnp.float64:
        raise NotImplementedError(
            f"fn switches to numbers of 64 bits inside ({wide[0]}): expected jax.enable_x64 around "
            "the call of the whole step, or the configuration jax_enable_x64"
        )


def _check_no_references(atoms: Sequence[Atom]) -> None:
    """Raises a NotImplementedError if an atom of a linear program is a reference."""
    refs = [atom.aval for atom in atoms if is_reference(atom)]
    if refs:
        raise NotImplementedError(
            f"fn makes or differentiates a reference of jax.new_ref ({refs[0]}): expected arrays "
            "alone. Use x.at[...].set or the carry of jax.lax.scan; make a reference that counts "
            "outside of fn"
        )


def transpose(linear: Program, count: int) -> Program:
    """Returns the backward program of a linear one.

    It consists of the transposed equations. JAX transposes equal ones once. The backward rule of
    a user's `jax.custom_vjp` stays one equation, since what it makes of residuals may be costly.

    Args:
        linear: From coefficients and tangents to tangents.
        count: How many of its arguments are tangents.

    Returns:
        From the coefficients and the cotangents of the results to those of these arguments.
    """
    tangents = linear.arguments[len(linear.arguments) - count :]
    moving = tangents_of(linear.equations, tangents)
    arriving = [Variable(v.aval) for v in linear.results]
    builder = _Following(arriving)
    env = builder.constants_of(linear) | {v: v for v in linear.arguments}
    cotangents: Renaming = {}

    def arrive(values: Sequence[Atom], of_values: Sequence[Atom]) -> None:
        for value, cotangent in zip(values, of_values, strict=True):
            if not (is_variable(value) and value in moving):
                continue
            if not (is_variable(cotangent) and cotangent in builder.followed):
                continue  # zeros
            if value in cotangents:
                both = cotangents[value], cotangent
                (cotangent,) = builder.trace(lambda x, y: [lax.add(x, y)], *both, key="sum")
            cotangents[value] = cotangent

    for equation in linear.equations:
        if moving.isdisjoint(variables(equation.invars)):
            builder.copy(equation, env)
    arrive(linear.results, arriving)
    for equation in reversed(linear.equations):
        operands = variables(equation.invars)
        moved = [v for v in operands if v in moving]
        pushed = [v for v in variables(equation.outvars) if v in cotangents]
        if not moved or not pushed:
            continue
        equal, arrived = _key(equation, moved), [v in cotangents for v in equation.outvars]
        pull = functools.partial(_transposed, equation, moved, pushed)
        if is_rule_of_user(equation):
            pull = functools.partial(undivided, pull)
        of_moved = builder.trace(
            pull,
            [env[v] for v in operands if v not in moving],
            renamed(cotangents, pushed),
            at=equation,
            key=equal and (equal, *arrived, *avals(moved)),
        )
        arrive(moved, of_moved)
    for value in tangents:
        if value not in cotangents:
            (cotangents[value],) = builder.trace(lambda kind=value.aval: [filled(kind, 0.0)])
    arguments = [*linear.arguments[: len(linear.arguments) - count], *arriving]
    return builder.program(linear, arguments, renamed(cotangents, tangents))


class _Following(Builder):
    """Notes which variables depend on some of them."""

    def __init__(self, followed: Sequence[Variable]) -> None:
        super().__init__()
        self.followed: set[Variable] = set(followed)

    def add(self, equation: Equation, operands: Sequence[Atom]) -> Sequence[Atom]:
        """Adds an equation, whose results depend on what its operands do."""
        results = super().add(equation, operands)
        if not self.followed.isdisjoint(variables(operands)):
            self.followed.update(variables(results))
        return results


def _transposed(
    equation: Equation,
    moving: Sequence[Variable],
    pushed: Sequence[Variable],
    values: Sequence[Array],
    cotangents: Sequence[Array],
) -> list[Array]:
    """Returns the cotangents of some operands of a linear equation, from those of its results."""
    others = [v for v in variables(equation.invars) if v not in moving]

    def push(*moved: Array) -> list[Array]:
        env = dict(zip((*others, *moving), (*values, *moved), strict=True))
        outputs = apply(_unplaced(equation), [read(env, atom) for atom in equation.invars])
        result_of = dict(zip(equation.outvars, outputs, strict=True))
        return [result_of[v] for v in pushed]

    return list(jax.linear_transpose(push, *avals(moving))(list(cotangents)))
