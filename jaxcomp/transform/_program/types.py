"""Names for what programs consist of, with types that say that all values are arrays."""

from typing import TYPE_CHECKING, Any, TypeAlias

from jax.extend.core import JaxprEqn, Literal, Var
from jaxtyping import Array

if TYPE_CHECKING:
    from jax.core import ShapedArray
    from typing_extensions import TypeIs

    class Variable(Var):
        """A variable of a program."""

        aval: ShapedArray

    class Constant:
        """A number that stands in an equation."""

        aval: ShapedArray
        val: Array

    class Equation(JaxprEqn):
        """A step of a program: a primitive, its parameters, operands and results."""

        invars: list[Variable | Constant]  # type: ignore[assignment]
        outvars: list[Variable]  # type: ignore[assignment]

        def replace(self, **changes: Any) -> "Equation": ...  # type: ignore[override]

else:
    Variable, Constant, Equation = Var, Literal, JaxprEqn

Atom: TypeAlias = Variable | Constant
Renaming: TypeAlias = dict[Variable, Atom]  # variables of a program in another one


def is_variable(atom: object) -> "TypeIs[Variable]":
    """Returns whether an operand is a variable, not a number."""
    return isinstance(atom, Var)
