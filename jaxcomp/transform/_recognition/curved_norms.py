"""Finds norms before activation functions in a program, whoever wrote them."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from jaxcomp.codecs._codec import FLOATS
from jaxcomp.transform._program.types import Atom, Equation, Variable, is_variable
from jaxcomp.transform._recognition.beginnings import FEW, Beginning, beginning
from jaxcomp.transform._recognition.factors import (
    Factor,
    Layout,
    layout_of,
    leaves,
    rearranged,
    varies_with,
)
from jaxcomp.transform._recognition.means import Means
from jaxcomp.transform._recognition.norms import Centred
from jaxcomp.transform._recognition.pattern import LAYOUT, Pattern
from jaxcomp.transform._recognition.traced_norms import Groups, Step, TracedNormalization

End = TypeVar("End")
_ELEMENTWISE = {
    *("add", "sub", "mul", "div", "max", "select_n"),
    *("integer_pow", "pow", "rsqrt", "sqrt", "square"),
}


@dataclasses.dataclass(frozen=True, eq=False)
class CurvedNorm:
    """A norm of a program, up to the argument of an activation function.

    Attributes:
        x: Variable that is normalised.
        mean: Variable of the means.
        variance: Variable of the variances.
        parameters: Variables of which gain and offset are made.
        y: Variable of the result.
        norm: Its formulas.
    """

    x: Any
    mean: Any
    variance: Any
    parameters: list[Any]
    y: Any
    norm: TracedNormalization


class _Step(NamedTuple):
    """A product, quotient or sum of the normalised array and an operand.

    Attributes:
        name: "mul", "div" or "add".
        divides: Whether the operand is divided by the deviation, too.
        operand: The operand.
        layout: Of the array.
    """

    name: str
    divides: bool
    operand: Any
    layout: Layout


@dataclasses.dataclass
class _Chain:
    """What follows an array less its mean.

    Attributes:
        value: The last result.
        layout: Of it.
        variance: The variance by whose root it is divided; None before it is.
        epsilon: What is added to the variance.
        steps: Other steps.
        parameters: What the operands are made of, besides statistics.
    """

    value: Any
    layout: Layout
    variance: Any = None
    epsilon: float = 0.0
    steps: list[_Step] = dataclasses.field(default_factory=list)
    parameters: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class _Search(Centred):
    """Looks for the norm of an array and its mean.

    Attributes:
        shape: Shape of the array before it is reshaped into groups, if it is.
    """

    shape: tuple[int, ...]
    _layouts: dict[Variable, Layout | None] = dataclasses.field(default_factory=dict)

    def chains(self, begins: Beginning) -> Iterator[_Chain]:
        """Returns what may be the argument of an activation function, and how it is made."""
        chain = _Chain(begins.value, self.means.layout)
        if begins.factor is not None and not self._multiply(chain, "mul", begins.factor):
            return
        if begins.bias is not None and not self._shift(chain, begins.bias):
            return
        while True:
            if chain.variance is not None and chain.value.aval.shape == self.shape:
                yield chain
            reader = self.next(chain.value)
            if reader is None or not self._take(chain, reader):
                return
            chain.value = reader.outvars[0]

    def _take(self, chain: _Chain, reader: Equation) -> bool:
        """Adds a step to a chain; False if it is none."""
        name = reader.primitive.name
        others = [a for a in reader.invars if a is not chain.value]
        if name in ("reshape", "convert_element_type") and not others:
            layout = rearranged(chain.layout, reader)
            chain.layout = layout or []
            return layout is not None
        is_step = name in ("mul", "add") or (name == "div" and reader.invars[0] is chain.value)
        if not is_step or len(others) != 1 or not is_variable(others[0]):
            return False
        (operand,) = others
        if name == "add":
            return self._shift(chain, operand)
        return self._multiply(chain, name, operand)

    def _multiply(self, chain: _Chain, name: str, operand: Any) -> bool:
        """Adds a product or quotient to a chain; False if it is none."""
        parameters, divides = [], False
        for atom, exponent in self.factors(operand):
            found = self.deviation((atom, exponent if name == "mul" else -exponent))
            if found is None:
                parameters.append(atom)
            elif chain.variance is not None or not self._meets_own(operand, chain.layout):
                return False
            else:
                (chain.variance, chain.epsilon), divides = found, True
        step = _Step(name, divides, operand, chain.layout)
        return not parameters or self._add(chain, step, parameters)

    def _shift(self, chain: _Chain, operand: Any) -> bool:
        """Adds a sum to a chain; False if it is not divided by the deviation yet."""
        step = _Step("add", False, operand, chain.layout)
        return chain.variance is not None and self._add(chain, step, [operand])

    def _add(self, chain: _Chain, step: _Step, parameters: Sequence[Any]) -> bool:
        shape = step.operand.aval.shape
        sizes = [shape[axis] for axis in self.varying(step.operand)]
        if len(shape) != len(chain.layout) or math.prod(sizes) * FEW > math.prod(self.shape):
            return False
        chain.steps.append(step)
        chain.parameters += [self.pattern.through(atom, *LAYOUT) for atom in parameters]
        return True

    def varying(self, atom: Atom) -> set[int]:
        """Returns the axes along which values may differ."""
        equation = self.pattern.made_by.get(atom) if is_variable(atom) else None
        shape = atom.aval.shape
        long = {axis for axis, size in enumerate(shape) if size != 1}
        if equation is None or not long:
            return long
        name = equation.primitive.name
        if name == "broadcast_in_dim":
            dims = equation.params["broadcast_dimensions"]
            return {dims[axis] for axis in self.varying(equation.invars[0])}
        return (
            self.varying(equation.invars[0]) if name in ("convert_element_type", "pvary") else long
        )

    def _meets_own(self, operand: Atom, layout: Layout) -> bool:
        """Returns whether each element of the centred array meets the deviation of its group."""
        found = self._layout(operand)
        if found is None or len(found) != len(layout):
            return False
        return varies_with(found, layout) == leaves(self.statistics.kept)

    def _layout(self, atom: Atom) -> Layout | None:
        """Returns the layout of what is made of statistics and parameters, which are constants."""
        if not is_variable(atom):
            return []
        if atom not in self._layouts:
            found = self.means.arranged(atom)
            self._layouts[atom] = self._layout_of_steps(atom) if found is None else found[1]
        return self._layouts[atom]

    def _layout_of_steps(self, atom: Variable) -> Layout | None:
        equation = self.pattern.made_by.get(atom)
        name = "" if equation is None else equation.primitive.name
        if equation is not None and name in LAYOUT:
            layout = self._layout(equation.invars[0])
            return None if layout is None else rearranged(layout, equation)
        if equation is None or name not in _ELEMENTWISE:
            return [
                [Factor(size, is_constant=True)] if size != 1 else [] for size in atom.aval.shape
            ]
        merged: Layout = [[] for _ in atom.aval.shape]
        for layout in map(self._layout, equation.invars):
            if layout is None or len(layout) not in (0, len(merged)):
                return None
            for axis, factors in enumerate(layout):
                varies = any(not f.is_constant for f in leaves(factors))
                if varies and any(not f.is_constant for f in leaves(merged[axis])):
                    if leaves(factors) != leaves(merged[axis]):
                        return None
                elif varies or not merged[axis]:
                    merged[axis] = factors
        return merged


def curved_norm(
    pattern: Pattern, equation: Equation, end: Callable[[Variable], End | None]
) -> tuple[CurvedNorm, End] | None:
    """Returns the norm that begins by an equation, and its end; None if there is none.

    Args:
        pattern: The program.
        equation: The equation.
        end: Returns the activation function of which a value is the argument, which ends the norm.
    """
    begins = beginning(pattern, equation)
    if begins is None:
        return None
    shape = begins.value.aval.shape
    if len(shape) < 3 or 0 in shape or begins.x.aval.shape != shape:
        return None
    grouped = pattern.before_casts(begins.x)
    regroup = pattern.made(grouped, "reshape")
    whole = grouped if regroup is None else pattern.before_casts(regroup.invars[0])
    for x in dict.fromkeys((grouped, whole)):
        if is_variable(x) and (found := _of(pattern, begins, x, grouped, end)) is not None:
            return found
    return None


def _of(
    pattern: Pattern,
    begins: Beginning,
    x: Variable,
    grouped: Variable,
    end: Callable[[Variable], End | None],
) -> tuple[CurvedNorm, End] | None:
    """Returns the norm of an array that is centred after it is reshaped into groups, if it is."""
    whole = layout_of(x.aval.shape)
    layout = whole if x is grouped else rearranged(whole, pattern.made_by[grouped])
    if layout is None:
        return None
    means = Means(pattern, layout)
    statistics = means.aligned(begins.mean)
    if statistics is None or len(statistics.axis_names) > 1:
        return None
    statistics = dataclasses.replace(statistics, of=pattern.before_casts(statistics.of))
    if statistics.of is not grouped:
        return None
    search = _Search(pattern, means, statistics, x.aval.shape)
    for chain in search.chains(begins):
        if (found := end(chain.value)) is not None:
            norm = _norm(search, chain, x, whole, begins.mean)
            return None if norm is None else (norm, found)
    return None


def _norm(
    search: _Search, chain: _Chain, x: Variable, layout: Layout, mean: Atom
) -> CurvedNorm | None:
    """Returns the norm, if each value of its statistics is of many elements."""
    pattern, kept, shape = search.pattern, leaves(search.statistics.kept), search.shape
    of_x = [pattern.through(atom, *LAYOUT) for atom in (mean, chain.variance)]
    parameters = [*dict.fromkeys(chain.parameters)]
    operands = [step.operand for step in chain.steps]
    factors = tuple(tuple((f.size, f in kept) for f in leaves(axis)) for axis in layout)
    wide = {i for i, axis in enumerate(factors) if any(is_kept for _, is_kept in axis)}
    varying = [s.layout[axis] for s in chain.steps for axis in search.varying(s.operand)]
    varied = {factor for axis in varying for factor in leaves(axis)}
    wide |= {i for i, axis in enumerate(layout) if varied.intersection(leaves(axis))}
    feature = max(wide - {0}, default=len(shape) - 1)
    few = math.prod(shape[i] for i in wide) * FEW <= math.prod(shape) and wide <= {0, feature}
    count = math.prod(f.size for f in kept)
    arrays = x, *of_x, *parameters
    if not (
        few
        and all(map(is_variable, arrays))
        and len(set(arrays)) == len(arrays)
        and all(a.aval.dtype.name in FLOATS for a in (*arrays, chain.value))
        and all(a.aval.size == count for a in of_x)
    ):
        return None
    of_statistics = pattern.slice([x], of_x)
    of_result = pattern.slice(arrays, [chain.value])
    of_steps = pattern.slice(arrays[1:], operands)
    if of_statistics is None or of_result is None or of_steps is None:
        return None
    axes = tuple(i for i in range(len(shape)) if i not in wide)
    norm = TracedNormalization(
        axes=tuple(sorted(_last(feature, len(shape)).index(i) for i in axes)),
        epsilon=chain.epsilon,
        feature=feature,
        groups=Groups(shape, factors, axes),
        of_statistics=of_statistics,
        of_result=of_result,
        of_steps=of_steps,
        steps=tuple(
            Step(s.name, s.divides, tuple(len(leaves(axis)) for axis in s.layout))
            for s in chain.steps
        ),
        axis_name=next(iter(search.statistics.axis_names), None),
        axis_index_groups=search.statistics.axis_index_groups,
    )
    return CurvedNorm(x, of_x[0], of_x[1], parameters, chain.value, norm)


def _last(feature: int, count: int) -> list[int]:
    """Returns the axes of an array in the order in which its features are last."""
    return [*(i for i in range(count) if i != feature), feature]
