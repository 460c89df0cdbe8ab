"""The forward program as a graph: what each value is made of, and what kind of value it is."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.typing import DTypeLike

from jaxcomp.codecs import Codec, Packed
from jaxcomp.codecs._codec import array_nbytes
from jaxcomp.policies._value import Value
from jaxcomp.transform._program.primitives import REDUCTIONS, is_affine, is_cheap
from jaxcomp.transform._program.program import Program, variables
from jaxcomp.transform._program.types import Atom, Equation, Variable, is_variable

# Names of stored values begin so: of any operation of ours, and of loops and conditionals.
OWN = "jaxcomp/"
NESTED = OWN + "part/"
REDUCED = 8  # a reduction to this part of its operand, or less, is a statistic


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """What the values of a forward program are made of.

    Attributes:
        program: The program.
        held: Arguments that the caller keeps anyway.
        same: Values that have a second way to be computed, each with a variable that is equal.
    """

    program: Program
    held: Set[Any]
    same: Mapping[Any, Any] = dataclasses.field(default_factory=dict)

    def defining_equation(self, value: Variable) -> tuple[Equation, int] | None:
        """Returns the equation that computes a value again, and which of its results that is."""
        while value in self.same:
            value = self.same[value]
        equation = self.program.made_by.get(value)
        return None if equation is None else (equation, equation.outvars.index(value))

    def operands(self, value: Variable) -> list[Variable]:
        """Returns the variables that a value is computed again from."""
        return self._operands.get(value, [])

    @functools.cached_property
    def _operands(self) -> dict[Variable, list[Variable]]:
        values = self.program.made_by
        definitions = {value: self.defining_equation(value) for value in values}
        return {v: variables(found[0].invars) for v, found in definitions.items() if found}

    @functools.cached_property
    def order(self) -> list[Any]:
        """The values, each after those that it is computed again from."""
        position = {value: i for i, value in enumerate(self.program.made_by)}

        def last(value: Variable) -> int:
            defined = self.defining_equation(value)
            return position[value if defined is None else defined[0].outvars[defined[1]]]

        return sorted(self.program.made_by, key=last)

    @functools.cached_property
    def free(self) -> set[Any]:
        """Values that cheap steps make of what is held, and of nothing else."""
        return self._made_of_held(is_cheap)

    @functools.cached_property
    def derived(self) -> set[Any]:
        """Values that cheap steps and reductions make of what is held, as a normalized kernel."""
        return self._made_of_held(lambda e: is_cheap(e) or e.primitive.name in REDUCTIONS)

    def _made_of_held(self, is_step: Callable[[Equation], bool]) -> set[Any]:
        found = set(self.held) | set(self.program.constants)
        for equation in self.program.equations:
            if is_step(equation) and found.issuperset(variables(equation.invars)):
                found.update(equation.outvars)
        return found

    @functools.cached_property
    def statistics(self) -> set[Any]:
        """Results of reductions to an eighth or less, and what cheap steps make of them alone."""
        found: set[Any] = set()
        for equation in self.program.equations:
            operands = variables(equation.invars)
            if equation.primitive.name in REDUCTIONS and operands:
                (out, *_) = equation.outvars
                if operands[0].aval.size >= REDUCED * _size(out):
                    found.update(equation.outvars)
            elif (
                is_cheap(equation)
                and found.intersection(operands)
                and all(v in found or v in self.free for v in operands)
            ):
                found.update(equation.outvars)
        return found

    def is_costly(self, value: Variable) -> bool:
        """Returns whether a value would have to be stored at full size, to be exact."""
        if not is_variable(value) or value in self.free or value in self.statistics:
            return False
        return value.aval.size > 1 and jnp.issubdtype(value.aval.dtype, jnp.floating)

    @functools.cached_property
    def names(self) -> dict[Any, list[Equation]]:
        """The equations that give a value a name, by what they take and what they make."""
        found: dict[Any, list[Equation]] = {}
        for equation in self.program.equations:
            if equation.primitive.name == "name":
                for value in variables([*equation.invars, *equation.outvars]):
                    found.setdefault(value, []).append(equation)
        return found

    def names_of(self, value: Variable) -> tuple[str, ...]:
        """Returns the names of a value, by `checkpoint_name`."""
        return tuple(dict.fromkeys(str(e.params["name"]) for e in self.names.get(value, ())))

    def is_own(self, value: Variable) -> bool:
        """Returns whether a value was stored by an operation or a loop of ours."""
        return value in self.names and any(name.startswith(OWN) for name in self.names_of(value))

    def roles(self, uses: Mapping[Variable, str]) -> dict[Variable, str]:
        """Returns the role of every value, from the roles of those that the backward pass reads.

        What these are affine in has their role, too.
        """
        found = dict(uses)
        for value in reversed(self.order):
            role = found.get(value)
            defined = self.defining_equation(value)
            if role is None or defined is None or not is_cheap(defined[0]):
                continue
            for operand in variables(defined[0].invars):
                if not is_affine(defined[0], functools.partial(operator.is_, operand)):
                    continue
                if role in ("residual", "statistic"):
                    found.setdefault(operand, role)
                elif found.get(operand) != "operand" and uses.get(operand) != "residual":
                    found[operand] = role
        for value in self.program.made_by:
            if value.aval.dtype == jnp.bool:
                found[value] = "mask"
            elif jnp.issubdtype(value.aval.dtype, jnp.integer):
                found[value] = "index"
            elif value in self.statistics:
                found[value] = "statistic"
        return found


def _size(atom: Atom) -> int:
    return int(atom.aval.size)


def nbytes(aval: ShapedArray | Value) -> int:
    """Returns the bytes of a value stored exactly; a boolean takes a bit."""
    if aval.dtype == jnp.bool:
        return coded_nbytes(Packed(1), aval.shape, aval.dtype)
    return plain_nbytes(aval)


@functools.lru_cache(4096)
def coded_nbytes(codec: Codec, shape: tuple[int, ...], dtype: DTypeLike) -> int:
    """Returns `codec.nbytes`, which traces the codec, once for each shape."""
    return codec.nbytes(shape, dtype)


def plain_nbytes(aval: ShapedArray | Value) -> int:
    """Returns the bytes of a value as JAX stores it."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return math.prod(aval.shape) * int(aval.dtype.itemsize)
    return array_nbytes(aval.shape, aval.dtype)
