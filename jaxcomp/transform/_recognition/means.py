"""Finds means and variances in a program."""

import dataclasses
import functools
import math
from typing import Any

from jax import lax

from jaxcomp.transform._program.program import avals
from jaxcomp.transform._program.types import Atom, Equation, Variable, is_variable
from jaxcomp.transform._recognition.factors import (
    Factor,
    Layout,
    all_leaves,
    leaves,
    rearranged,
    varies_with,
)
from jaxcomp.transform._recognition.pattern import LAYOUT, Pattern

_SUMS = {"reduce_sum", "psum", "psum_invariant"}


@dataclasses.dataclass(frozen=True)
class Mean:
    """A mean over some axes, or parts of them, and over devices.

    Attributes:
        of: The variable that it is the mean of.
        kept: The factors over which no mean is taken.
        axis_names: Names of the mesh or `vmap` axes over which it is a mean, too.
        axis_index_groups: Groups of indices within these.
    """

    of: Atom
    kept: tuple[Factor, ...]
    axis_names: tuple[str, ...] = ()
    axis_index_groups: Any = None


@dataclasses.dataclass(frozen=True)
class Means:
    """Looks for means of arrays of one shape.

    Attributes:
        pattern: The program.
        layout: That of the arrays.
    """

    pattern: Pattern
    layout: Layout

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        return tuple(math.prod(f.size for f in axis) for axis in self.layout)

    def mean(self, atom: Atom) -> Mean | None:
        """Returns what an atom is the mean of; None if it is no mean."""
        found = self.arranged(atom)
        return None if found is None else found[0]

    def arranged(self, atom: Atom) -> tuple[Mean, Layout] | None:
        """Returns what an atom is the mean of, and its layout; None if it is no mean."""
        steps: list[tuple[Equation, Atom]] = []
        picked: list[int] = []
        layout: Layout | None = None
        while layout is None:
            if not is_variable(atom) or atom not in self.pattern.made_by:
                return None
            equation = self.pattern.made_by[atom]
            source = self._source(equation, atom, picked)
            if source is None or not is_variable(source):
                return None
            steps.append((equation, source))
            atom = source
            if any(_reduces(e) for e, _ in steps):
                layout = self._layout_of_whole(atom)
        return self._checked(steps[::-1], atom, layout)

    def _layout_of_whole(self, atom: Atom) -> Layout | None:
        """Returns the layout of an array of the shape, or of squares of one that is reshaped."""
        if atom.aval.shape == self.shape:
            return self.layout
        root = self.pattern.through(self._squared(atom), "convert_element_type")
        regroup = self.pattern.made(root, "reshape")
        if regroup is None or avals(regroup.invars)[0].shape != self.shape:
            return None
        return rearranged(self.layout, regroup)

    def variance(self, atom: Atom) -> Mean | None:
        """Returns what an atom is the (biased) variance of; None if it is none."""
        atom = self._without_guards(atom)
        if equation := self.pattern.made(atom, "sub"):
            first, second = equation.invars
            return self._same(self._mean_square(first), self._mean_of_square(second))
        squares = self._mean_square(atom)
        if squares is None:
            return None
        centred = self.pattern.made(self.pattern.through(squares.of, "convert_element_type"), "sub")
        if centred is None:
            return None
        value, mean = centred.invars
        of_mean = self.aligned(mean)
        return self._same(dataclasses.replace(squares, of=value), of_mean)

    def aligned(self, atom: Atom) -> Mean | None:
        """Returns what an operand of an array of the layout is the mean of.

        It is None if it is none, or if an element of the array does not meet its own mean.
        """
        found = self.arranged(atom) if is_variable(atom) else None
        if found is None or len(found[1]) != len(self.layout):
            return None
        mean, layout = found
        return mean if varies_with(layout, self.layout) == leaves(mean.kept) else None

    def _without_guards(self, atom: Atom) -> Any:
        """Returns a variance before it is clipped at 0, and before it is NaN without elements."""
        pattern = self.pattern
        atom = pattern.through(atom, *LAYOUT)
        if equation := pattern.made(atom, "max"):
            numbers = [pattern.constant(a) for a in equation.invars]
            rest = [a for a, number in zip(equation.invars, numbers, strict=True) if number is None]
            if 0.0 in numbers and len(rest) == 1:
                atom = pattern.through(rest[0], *LAYOUT)
        if equation := pattern.made(atom, "select_n"):  # as jnp.var
            predicate, *_, chosen = equation.invars
            test = pattern.made(predicate, "gt")
            ends: list[Any] = [None] if test is None else list(map(pattern.constant, test.invars))
            if None not in ends and ends[0] > ends[1]:
                atom = pattern.through(chosen, *LAYOUT)
        return atom

    def _mean_square(self, atom: Atom) -> Mean | None:
        """Returns what an atom is the mean square of; None if it is none."""
        mean = self.mean(atom) if is_variable(atom) else None
        squared = None if mean is None else self._squared(mean.of)
        return None if mean is None or squared is None else dataclasses.replace(mean, of=squared)

    def _mean_of_square(self, atom: Atom) -> Mean | None:
        """Returns what the root of an atom is the mean of; None if it is no square of a mean."""
        root = self._squared(self.pattern.through(atom, *LAYOUT))
        return None if root is None else self.mean(root)

    def _same(self, first: Mean | None, second: Mean | None) -> Mean | None:
        """Returns a mean, if another is of the same array."""
        if first is None or second is None:
            return None
        first, second = (dataclasses.replace(m, of=self._whole(m.of)) for m in (first, second))
        return first if first == second else None

    def _whole(self, atom: Atom) -> Any:
        """Returns an array of the shape, before casts, of which another is a reshape."""
        atom = self.pattern.before_casts(atom)
        regroup = None if atom.aval.shape == self.shape else self.pattern.made(atom, "reshape")
        return atom if regroup is None else self.pattern.before_casts(regroup.invars[0])

    def _squared(self, atom: Atom) -> Any:
        """Returns what an atom is the square of; None if it is no square."""
        atom = self.pattern.through(atom, "convert_element_type")
        equation = self.pattern.made(atom, "square", "integer_pow", "mul")
        if equation is None:
            return None
        name, (first, *rest) = equation.primitive.name, equation.invars
        is_power = name != "integer_pow" or equation.params["y"] == 2
        if not is_power or (name == "mul" and rest[0] is not first):
            return None
        return first if is_variable(first) else None

    # Steps

    def _source(self, equation: Equation, atom: Variable, picked: list[int]) -> Any:
        """Returns the operand of which an equation makes an atom as a step of a mean.

        It is None if of none.

        Several means may be stacked for one collective: `picked` has the number of that which is
        looked for.
        """
        name, operands = equation.primitive.name, equation.invars
        if name in LAYOUT:
            return operands[0] if self.pattern.made(atom, name) else None
        if name == "reduce_sum":
            return operands[0]
        if name in _SUMS:
            return operands[equation.outvars.index(atom)]
        if name in ("div", "mul"):
            first, second = operands
            if name == "mul" and self.pattern.constant(first) is not None:
                return second
            return first if self.pattern.constant(second) is not None else None
        if name == "slice" and _is_row(equation):
            picked.append(equation.params["start_indices"][0])
            return operands[0]
        if name == "unstack" and equation.params["axis"] == 0:
            picked.append(equation.outvars.index(atom))
            return operands[0]
        rows = {"stack": "axis", "concatenate": "dimension"}
        if name in rows and equation.params[rows[name]] == 0 and picked:
            number = picked.pop()
            of_one_row = name == "stack" or all(a.shape[0] == 1 for a in avals(operands))
            return operands[number] if of_one_row else None
        return None

    def _checked(
        self, steps: list[tuple[Equation, Atom]], of: Atom, layout: Layout | None
    ) -> tuple[Mean, Layout] | None:
        """Returns the mean that steps take of an array, and its layout; None if they take none."""
        summed: list[Factor] = []
        divisor = 1.0
        names: list[str] = []
        groups: list[Any] = []
        for equation, _ in steps:
            name = equation.primitive.name
            assert layout is not None
            if name in _SUMS:
                axes = equation.params["axes"]
                own = {a for a in axes if not isinstance(a, str)}
                summed += [f for axis in own for f in layout[axis]]
                layout = [factors for i, factors in enumerate(layout) if i not in own]
                names += [a for a in axes if isinstance(a, str)]
                groups.append(equation.params.get("axis_index_groups"))
            elif name in ("div", "mul"):
                number = self._constant_of(equation)
                divisor *= number if name == "div" else 1 / number if number else math.nan
            elif name == "stack":
                layout = [[], *layout]
            elif name == "unstack":
                layout = None if layout[0] else layout[1:]
            elif name in LAYOUT:
                layout = rearranged(layout, equation)
            if layout is None:
                return None
        groups = [g for g in groups if g is not None]
        replicas = _replicas(names, groups)
        over, whole = leaves(summed), all_leaves(self.layout)
        if layout is None or replicas is None or any(f.is_constant for f in over):
            return None
        kept = tuple(f for f in whole if f not in over)
        if [f for f in all_leaves(layout) if not f.is_constant] != list(kept):
            return None
        count = math.prod(f.size for f in over)
        if not math.isclose(divisor, count * replicas, rel_tol=1e-6):
            return None
        return Mean(of, kept, tuple(names), groups[0] if groups else None), layout

    def _constant_of(self, equation: Equation) -> float:
        numbers = [self.pattern.constant(a) for a in equation.invars]
        (number,) = [a for a in numbers if a is not None]
        return number


def _reduces(equation: Equation) -> bool:
    axes = equation.params.get("axes", ()) if equation.primitive.name in _SUMS else ()
    return any(not isinstance(axis, str) for axis in axes)


def _is_row(equation: Equation) -> bool:
    """Returns whether an equation slices one row of all of a matrix."""
    (before,), (after,) = avals(equation.invars), avals(equation.outvars)
    return (
        before.shape[1:] == after.shape[1:]
        and after.shape[0] == 1
        and set(equation.params["strides"] or ()) <= {1}
    )


def _replicas(names: list[str], groups: list[Any]) -> int | None:
    """Returns over how many devices a mean is taken, or None if that is not known."""
    if groups:
        sizes = {len(group) for group in groups[0]}
        return sizes.pop() if len(groups) == len(names) == len(sizes) == 1 else None
    try:
        return functools.reduce(lambda count, name: count * lax.axis_size(name), names, 1)
    except NameError:  # outside of the `vmap`
        return None
