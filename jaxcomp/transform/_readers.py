"""Which of the user's calls read a saved value in the backward pass."""

from typing import Any

from jaxcomp.memory._source_line import source_call, source_line
from jaxcomp.transform._programs import is_variable
from jaxcomp.transform._schedule import Schedule

_NAMED = 2


class Readers:
    """The equations of the backward pass that read each saved value.

    They have the source lines of the forward pass.
    """

    def __init__(self, schedule: Schedule) -> None:
        """Follows the coefficients of the backward program back to what is saved."""
        self._direct: dict[Any, dict[tuple[str, str], None]] = {}
        backward = schedule.backward.jaxpr
        inputs = dict(zip(backward.invars, schedule.coefficients, strict=False))
        for equation in backward.eqns:
            for atom in equation.invars:
                coefficient = inputs.get(atom) if is_variable(atom) else None
                if coefficient is not None and is_variable(coefficient.value):
                    where = source_call(equation), source_line(equation)
                    self._direct.setdefault(coefficient.value, {})[where] = None
        self._all = {value: dict(found) for value, found in self._direct.items()}
        for value in reversed(schedule.graph.order):
            if value in self._all and value not in schedule.stored:
                for operand in schedule.graph.operands(value):
                    self._all.setdefault(operand, {}).update(self._all[value])

    def line_of_first(self, value: Any) -> str:
        """The source line of the first reader, or ""."""
        return next((line for _, line in self._direct.get(value, ())), "")

    def all_of(self, value: Any) -> str:
        """The user's calls that read a value, or what is computed from it; "" if there are none."""
        found = list(self._all.get(value, ()))
        more = [f"{len(found) - _NAMED} more"] if len(found) > _NAMED else []
        return " and ".join([*map(_described, found[:_NAMED]), *more])

    def first_of(self, value: Any) -> str:
        """The first user's call that reads a value; "" if there is none."""
        found = {**self._direct.get(value, {}), **self._all.get(value, {})}
        return next(map(_described, found), "")


def _described(where: tuple[str, str]) -> str:
    return ", ".join(filter(None, where))
