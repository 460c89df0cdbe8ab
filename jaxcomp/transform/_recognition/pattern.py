"""A program as a graph in which patterns are looked for."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util

from jaxcomp.transform._program.program import Program, avals, is_of_collective, variables
from jaxcomp.transform._program.types import Atom, Equation, Variable, is_variable

# What rearranges values, casts them, or changes no more than their type.
LAYOUT = {
    "broadcast_in_dim",
    "convert_element_type",
    "expand_dims",
    "pvary",
    "reshape",
    "squeeze",
}
Labels = list[int | None]
"""Which axis of another array each axis of an array is; None for an axis of size 1 that is none."""


class Pattern:
    """A program as a graph, in which patterns are looked for.

    Args:
        program: The program, flat.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.made_by, self.readers = program.made_by, program.readers
        self.results = set(variables(program.results))
        self._numbers = {id(equation): i for i, equation in enumerate(program.equations)}

    def made(self, atom: Atom, *primitives: str) -> Equation | None:
        """Returns the equation that makes a variable, if it is of one of these primitives.

        Casts from or to integers do not count: no gradient passes them.
        """
        equation = self._maker(atom, *primitives)
        return None if equation is None or _is_cast_of_integers(equation) else equation

    def _maker(self, atom: Atom, *primitives: str) -> Equation | None:
        equation = self.made_by.get(atom) if is_variable(atom) else None
        return equation if equation and equation.primitive.name in primitives else None

    def through(self, atom: Atom, *primitives: str) -> Any:
        """Returns what an atom is made of by operations of these primitives alone."""
        while equation := self.made(atom, *primitives):
            atom = equation.invars[0]
        return atom

    def only_reader(self, value: Variable) -> Equation | None:
        """Returns the one equation that reads a value that is no result.

        It is None if there is no such one.
        """
        readers = self.readers.get(value, [])
        alone = len(readers) == 1 and value not in self.results
        return readers[0] if alone else None

    def constant(self, atom: Atom) -> float | None:
        """Returns the number that an atom is for every input; None if it is none."""
        if not is_variable(atom):
            return float(atom.val) if np.ndim(atom.val) == 0 else None
        equation = self._maker(atom, "sub", "add", "mul", "div", "max", *LAYOUT)
        if equation is None or math.prod(atom.aval.shape) != 1:
            return None
        operands = [self.constant(a) for a in equation.invars]
        if any(a is None for a in operands):
            return None
        numbers: list[Any] = operands
        steps: dict[str, Callable[..., float]] = {
            "sub": lambda a, b: a - b,
            "add": lambda a, b: a + b,
            "mul": lambda a, b: a * b,
            "div": lambda a, b: a / b if b else math.nan,
            "max": max,
        }
        return steps.get(equation.primitive.name, lambda a: a)(*numbers)

    def before_casts(self, atom: Atom) -> Any:
        """Returns the variable of the same values that an array is a cast of."""
        while equation := self.made(atom, "convert_element_type"):
            if not _keeps_values(equation):
                break
            atom = equation.invars[0]
        return atom

    def feature_axis(self, atom: Atom, shape: tuple[int, ...]) -> int | None:
        """Returns the axis of an array of some shape along which alone an operand of it varies.

        The last axis, if the operand is one value; None if there is no such axis.
        """
        while is_variable(atom) and atom.aval.ndim == len(shape):
            sizes = atom.aval.shape
            axes = [i for i, n in enumerate(sizes) if n != 1]
            if not axes and shape[-1] == 1:
                return len(shape) - 1
            if len(axes) == 1:
                return axes[0] if sizes[axes[0]] == shape[axes[0]] else None
            equation = self.made(atom, "broadcast_in_dim", "convert_element_type", "pvary")
            if equation is None:
                return None
            (atom, *_) = equation.invars
            dims = equation.params.get("broadcast_dimensions")
            if dims is not None and is_variable(atom):
                axes = [d for d, n in zip(dims, atom.aval.shape, strict=True) if n != 1]
                return axes[0] if len(axes) == 1 and shape[axes[0]] == atom.aval.size else None
        return None

    def of_features(self, atom: Atom, count: int) -> Any:
        """Returns the variable of one value per feature that an atom repeats.

        It is of shape (features,), unless another operation makes the values in another shape.
        """
        while is_variable(atom) and atom.aval.ndim != 1 and (equation := self.made(atom, *LAYOUT)):
            operand: Any = equation.invars[0]
            if not is_variable(operand) or operand.aval.size != count:
                break
            atom = operand
        return atom

    def slice(
        self, inputs: Sequence[Variable], outputs: Sequence[Variable], scoped: bool = False
    ) -> Program | None:
        """Returns the part of the program from some variables to others; None if it reads more.

        Its equations have their own name scopes if `scoped`; else they have none, and take the
        scope of the operation that evaluates them.
        """
        known = set(inputs)
        wanted, taken = list(outputs), dict[int, Equation]()
        while wanted:
            value = wanted.pop()
            if value in known:
                continue
            known.add(value)
            equation = self.made_by.get(value)
            if equation is None or not all(map(is_of_collective, equation.effects)):
                return None
            taken[self._numbers[id(equation)]] = equation
            wanted += variables(equation.invars)
        equations = [taken[number] for number in sorted(taken)]
        if not scoped:
            nowhere = source_info_util.NameStack()
            equations = [
                e.replace(source_info=e.source_info.replace(name_stack=nowhere)) for e in equations
            ]
        part = self.program.jaxpr.replace(
            constvars=[],
            invars=list(inputs),
            outvars=list(outputs),
            eqns=equations,
            effects={effect for e in equations for effect in e.effects},
        )
        return Program(part)


def relabelled(labels: Labels, before: tuple[int, ...], after: tuple[int, ...]) -> Labels | None:
    """Returns the labels of axes once axes of size 1 are inserted or removed.

    It is None if others change.
    """
    if before == after:
        return labels
    if [n for n in before if n != 1] != [n for n in after if n != 1]:
        return None
    kept = iter([label for label, n in zip(labels, before, strict=True) if n != 1])
    return [None if n == 1 else next(kept) for n in after]


def _is_cast_of_integers(equation: Equation) -> bool:
    dtypes = [a.dtype for a in avals([*equation.invars, *equation.outvars])]
    floating = all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes)
    return equation.primitive.name == "convert_element_type" and not floating


def _keeps_values(cast: Equation) -> bool:
    """Returns whether a cast is from floating-point numbers to a dtype that holds all of them."""
    (before,), (after,) = avals(cast.invars), avals(cast.outvars)
    floating = jnp.issubdtype(before.dtype, jnp.floating)
    return floating and jnp.promote_types(before.dtype, after.dtype) == after.dtype
