"""Finds attentions in a program, whoever wrote them."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jax.extend.core import DropVar, JaxprEqn

from jaxcomp.transform._algebra import REDUCTIONS, is_cheap, is_cheap_rule
from jaxcomp.transform._pattern import Pattern
from jaxcomp.transform._programs import Program, variables

_LONGEST = 100  # equations between the two products


@dataclasses.dataclass(frozen=True, eq=False)
class Attention:
    """Softmax of the products of queries and keys, times values.

    Attributes:
        operands: The variables that it reads: queries, keys, values, and masks.
        equation: The equation that makes the result.
        scores: Variable of the products of queries and keys.
        program: From the operands to the result.
    """

    operands: list[Any]
    equation: JaxprEqn
    scores: Any
    program: Program
    kind = "attention"

    @property
    def origin(self) -> JaxprEqn:
        """The equation that makes the result."""
        return self.equation

    @property
    def results(self) -> list[Any]:
        """The variable that it makes."""
        return list(self.equation.outvars)

    @property
    def saved(self) -> list[Any]:
        """The variable of the shape and dtype of what is not saved."""
        return [self.scores]


def attentions(pattern: Pattern) -> Iterator[Attention]:
    """The attentions whose scores have more elements than queries, keys and values."""
    constants = _constants(pattern)
    for equation in pattern.jaxpr.eqns:
        if _is_batched(equation):
            found = _attention(pattern, equation, constants)
            if found is not None:
                yield found


def _constants(pattern: Pattern) -> set[Any]:
    """The variables that are the same for every input, such as a causal mask."""
    found: set[Any] = set()
    for equation in pattern.jaxpr.eqns:
        if is_cheap(equation) and found.issuperset(variables(equation.invars)):
            found.update(equation.outvars)
    return found


def _is_batched(equation: JaxprEqn) -> bool:
    if equation.primitive.name != "dot_general":
        return False
    _, (batch, _) = equation.params["dimension_numbers"]
    return len(batch) > 0


def _attention(pattern: Pattern, first: JaxprEqn, constants: set[Any]) -> Attention | None:
    """The attention that begins by a product of queries and keys."""
    made: set[Any] = set(first.outvars)
    last: JaxprEqn | None = None
    steps = {id(first): first}
    queue: list[Any] = list(first.outvars)
    while queue:
        value = queue.pop()
        if value in pattern.results or len(steps) > _LONGEST:
            return None
        for reader in pattern.readers.get(value, []):
            if _is_batched(reader):
                if last is not None and reader is not last:
                    return None
                last = reader
            elif not _is_step(reader):
                return None
            elif id(reader) not in steps:
                steps[id(reader)] = reader
                outs = [v for v in reader.outvars if not isinstance(v, DropVar)]
                made.update(outs)
                queue += outs
    if last is None or not any(map(_is_exp, steps.values())):
        return None
    steps[id(last)] = last
    read = [v for step in steps.values() for v in variables(step.invars)]
    operands = [v for v in dict.fromkeys(read) if v not in made and v not in constants]
    ends = {v for step in (first, last) for v in variables(step.invars)} - made
    (scores,) = first.outvars
    if scores.aval.size <= sum(v.aval.size for v in ends):  # type: ignore[attr-defined]
        return None
    program = pattern.slice(operands, last.outvars, scoped=True)
    return None if program is None else Attention(operands, last, scores, program)


def _is_step(equation: JaxprEqn) -> bool:
    return is_cheap(equation) or equation.primitive.name in REDUCTIONS or is_cheap_rule(equation)


def _is_exp(equation: JaxprEqn) -> bool:
    called = equation.params.get("call_jaxpr") or equation.params.get("jaxpr")
    if called is not None:
        return any(map(_is_exp, getattr(called, "jaxpr", called).eqns))
    return equation.primitive.name in ("exp", "exp2")
