"""Builds programs from equations of other programs, without evaluating them."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.extend.core import DropVar, Literal, Var
from jax.tree_util import PyTreeDef
from jaxtyping import Array, PyTree

from jaxcomp.transform._program.origins import located, placed
from jaxcomp.transform._program.program import Program, avals, called_program, evaluate, variables
from jaxcomp.transform._program.types import (
    Atom,
    Constant,
    Equation,
    Renaming,
    Variable,
    is_variable,
)

_BARRIER = "optimization_barrier"

Add = Callable[[Equation, list[Atom]], Sequence[Atom]]


class Builder:
    """Collects equations, equal ones once, and none that reshapes an array back.

    Operands and results are atoms: variables and literals of the new program.
    """

    def __init__(self) -> None:
        self._equations: list[Equation] = []
        self._constants: dict[int, tuple[Variable, Array]] = {}
        # Programs and the structure of their results, by key and types of operands.
        self._traced: dict[Hashable, tuple[Program, PyTreeDef]] = {}
        self._known: dict[Hashable, Sequence[Atom]] = {}
        # Of an array, the shapes that it was reshaped from.
        self._before: dict[Variable, list[Variable]] = {}

    def add(self, equation: Equation, operands: Sequence[Atom]) -> Sequence[Atom]:
        """Adds an equation with other operands, and returns its results."""
        key = _key_of(equation, operands)
        if key is not None and key in self._known:
            return self._known[key]
        if _is_reshape(equation) and is_variable(operands[0]):
            before = [operands[0], *self._before.get(operands[0], ())]
            same = [v for v in before if v.aval == equation.outvars[0].aval]
            if same:
                return same[:1]
        else:
            before = []
        results = [Variable(v.aval) for v in equation.outvars]
        returned = [
            forwarded if is_variable(forwarded) else v
            for forwarded, v in zip(_returned(equation, operands), results, strict=True)
        ]
        self._before.update((v, before) for v in results if before)
        effects = equation.effects
        if effects:
            pairs = zip(equation.invars, operands, strict=True)
            given = {v: operand for v, operand in pairs if isinstance(v, Var)}
            effects = {_of_operands(effect, given) for effect in effects}
        self._equations.append(
            equation.replace(invars=list(operands), outvars=results, effects=effects)
        )
        if key is not None:
            self._known[key] = returned
        return returned

    def copy(self, equation: Equation, env: Renaming) -> None:
        """Adds an equation of another program, whose variables `env` renames."""
        results = self.add(equation, renamed(env, equation.invars))
        env.update(zip(equation.outvars, results, strict=True))

    def inline(
        self,
        program: Program,
        operands: Sequence[Atom],
        step: Add | None = None,
        call: Equation | None = None,
    ) -> list[Atom]:
        """Adds the equations of a program, with calls looked through.

        Args:
            program: The program.
            operands: Its arguments in the new program.
            step: Adds an equation; by default `add`.
            call: Equation that calls the program; its name scope comes first.

        Returns:
            The program's results.
        """
        add = step or self.add

        def take(equation: Equation, values: list[Atom]) -> Sequence[Atom]:
            if call is not None:
                equation = _within(equation, call)
            called = called_program(equation)
            if called is None:
                return add(equation, values)
            return self.inline(located(called, equation), values, add, equation)

        constants: Any = list(self.constants_of(program).values())
        return evaluate(Program(program.jaxpr, constants), operands, take, _renamed)

    def trace(
        self,
        function: Callable[..., PyTree],
        *operands: PyTree,
        at: Equation | None = None,
        key: Hashable | None = None,
    ) -> PyTree:
        """Adds the equations of a function of arrays.

        Args:
            function: The function.
            *operands: Its arguments: pytrees of atoms.
            at: Equation whose name scope and source line the new ones get.
            key: What the function depends on. With a key, it is traced once for operands of equal
                types.

        Returns:
            The function's results: a pytree of atoms.
        """
        leaves, tree = jax.tree.flatten(operands)
        kinds = avals(leaves)
        traced, types = {} if key is None else self._traced, (key, tree, *kinds)
        if types not in traced:
            of_results: list[PyTreeDef] = []

            def flat(*operands: PyTree) -> list[Array]:
                results, structure = jax.tree.flatten(function(*operands))
                of_results.append(structure)
                return results

            program = Program.trace(flat, *jax.tree.unflatten(tree, kinds))
            traced[types] = program, of_results[0]
        program, structure = traced[types]

        def step(equation: Equation, values: list[Atom]) -> Sequence[Atom]:
            return self.add(equation if at is None else placed(equation, at), values)

        return jax.tree.unflatten(structure, self.inline(program, leaves, step))

    def program(self, like: Program, arguments: Sequence[Atom], results: Sequence[Atom]) -> Program:
        """Returns the program so far.

        Args:
            like: Program of the same effects.
            arguments: Its arguments.
            results: Its results.
        """
        constants = list(self._constants.values())
        used = {a for e in self._equations for a in e.invars if isinstance(a, Var)}
        used.update(a for a in results if isinstance(a, Var))
        for equation in self._equations:
            if not used.issuperset(equation.outvars):
                outs: list[Any] = equation.outvars
                outs[:] = [v if v in used else DropVar(v.aval) for v in outs]
        jaxpr = like.jaxpr.replace(
            constvars=[variable for variable, _ in constants],
            invars=list(arguments),
            outvars=list(results),
            eqns=self._equations,
        )
        return Program(jaxpr, [value for _, value in constants])

    def constants_of(self, program: Program) -> Renaming:
        """Returns the variables of a program's constants in the new program."""
        env: Renaming = {}
        for variable, value in zip(program.constants, program.consts, strict=True):
            env[variable], _ = self._constants.setdefault(
                id(value), (Variable(variable.aval), value)
            )
        return env


def renamed(env: Renaming, atoms: Sequence[Atom] | Sequence[Var | Literal]) -> list[Atom]:
    """Returns variables by their names in the new program, and literals as they are."""
    return [_renamed(env, atom) for atom in cast(Sequence[Atom], atoms)]


def _renamed(env: Mapping[Variable, Atom], atom: Atom) -> Atom:
    return env[atom] if is_variable(atom) else atom


def flat(program: Program) -> Program:
    """Returns the same program with calls looked through and equal equations once."""
    builder = Builder()
    results = builder.inline(program, program.arguments)
    return builder.program(program, program.arguments, results)


def _is_reshape(equation: Equation) -> bool:
    """Returns whether an equation keeps the order of all values, and changes their shape alone."""
    if equation.primitive.name == "reshape":
        return equation.params["dimensions"] is None
    if equation.primitive.name not in ("broadcast_in_dim", "expand_dims", "squeeze"):
        return False
    (before, *_), (after,) = avals(equation.invars), avals(equation.outvars)
    return before.size == after.size


def _returned(equation: Equation, operands: Sequence[Atom]) -> Sequence[Atom | None]:
    """Returns the operands that a `jax.custom_batching.custom_vmap` function returns, by result."""
    if equation.primitive.name != "custom_vmap_call":
        return [None] * len(equation.outvars)
    jaxpr = equation.params["call"].jaxpr
    operand_of = dict(zip(jaxpr.invars, operands, strict=True))
    return [operand_of.get(v) if is_variable(v) else None for v in jaxpr.outvars]


def _within(equation: Equation, call: Equation) -> Equation:
    """Returns an equation, with the name scope of the one that calls its program first."""
    info = equation.source_info
    stack = call.source_info.name_stack + info.name_stack
    return equation.replace(source_info=info.replace(name_stack=stack))


def _of_operands(effect: Any, given: dict[Variable, Atom]) -> Any:
    """Returns an effect on an operand, as that on the operand of the new equation."""
    operand = getattr(effect, "input", None)
    return effect.replace(given[operand]) if is_variable(operand) else effect


def _key_of(equation: Equation, operands: Sequence[Hashable]) -> Hashable | None:
    """Returns what is equal for equations of equal results; None where there is no telling.

    Args:
        equation: The equation.
        operands: Its literals, and what stands for its variables.
    """
    if equation.effects or equation.primitive.name == _BARRIER:
        return None
    return (
        equation.primitive,
        tuple(_key_of_literal(a) if isinstance(a, Constant) else a for a in operands),
        tuple((name, hashable(value)) for name, value in equation.params.items()),
        equation.ctx,
    )


def key_of_step(equation: Equation) -> Hashable | None:
    """Returns what is equal for equations that do the same to variables of equal types."""
    number = {v: i for i, v in enumerate(variables(equation.invars))}
    return _key_of(equation, [number[a] if is_variable(a) else a for a in equation.invars])


class _Itself:
    """A value without a hash. It is equal to itself alone."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def hashable(value: object) -> Hashable:
    """Returns a value, or what is equal to it alone where it has no hash."""
    try:
        hash(value)
    except TypeError:
        return _Itself(value)
    return value


def _key_of_literal(literal: Constant) -> Hashable:
    return literal.aval, np.asarray(literal.val).tobytes()
