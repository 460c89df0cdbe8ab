"""Finds attentions in a program, whoever wrote them."""

import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import DropVar
from jaxtyping import Array

from jaxcomp.transform._pieces.limits import Limits, current_limits
from jaxcomp.transform._pieces.slices import has_parts, in_parts
from jaxcomp.transform._program.builder import flat
from jaxcomp.transform._program.keyed import Keyed
from jaxcomp.transform._program.primitives import REDUCTIONS, is_cheap, is_cheap_rule
from jaxcomp.transform._program.program import Program, avals, fixed_values, variables
from jaxcomp.transform._program.types import Equation, Variable
from jaxcomp.transform._recognition.pattern import Pattern
from jaxcomp.transform._recognition.unit import Codeless

_LONGEST = 100  # equations between the two products


@dataclasses.dataclass(frozen=True, eq=False)
class Attention(Codeless):
    """Softmax of the products of queries and keys, times values; the scores are recomputed.

    It reads queries, keys, values, and masks.

    Attributes:
        scores: Variable of the products of queries and keys.
        slices_forward: Whether the forward pass is evaluated in slices, too. Its sums may then be
            in another order.
    """

    scores: Any
    slices_forward: bool = False
    kind = "attention"
    decision = "recompute"

    @property
    def saved(self) -> list[Any]:
        """The variable of the shape and dtype of what is not saved."""
        return [self.scores]

    def is_sliced(self, reached: Collection[Variable], limits: Limits) -> bool:
        """Returns whether the backward pass can be evaluated in slices, and that is worth it.

        Args:
            reached: The variables that are differentiated.
            limits: Sizes of the slices.
        """
        if not limits.slices(self.scores.aval.size):
            return False
        moving = tuple(
            i
            for i, v in enumerate(self.operands)
            if v in reached and jnp.issubdtype(v.aval.dtype, jnp.inexact)
        )
        keyed = Keyed.of(self.program, moving, limits)
        if keyed is None:
            return _is_sliced(self.program, moving, limits)
        return _is_sliced_of_key(keyed)

    def evaluate(self, *operands: Array) -> list[Array]:
        """Returns the result, by the program's own steps, under `jax.checkpoint`."""
        derived = jax.checkpoint(self.program)
        if not self.slices_forward:
            return list(derived(*operands))

        def whole(_: Array, operands: Sequence[Array]) -> list[Array]:
            return self.program(*operands)

        limits = dataclasses.replace(current_limits(), outside=-1)
        in_slices = in_parts(self.program, whole, limits)

        @jax.custom_jvp
        def attention(*operands: Array) -> list[Array]:
            return in_slices(operands[0], operands)

        @attention.defjvp
        def _(primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[list[Array], Any]:
            _, moved = jax.jvp(derived, primals, tangents)
            return attention(*primals), list(moved)

        return attention(*operands)


@functools.lru_cache(256)
def _is_sliced_of_key(keyed: Keyed) -> bool:
    return _is_sliced(keyed.program, *keyed.rest)


def _is_sliced(program: Program, moving: Sequence[int], limits: Limits) -> bool:
    def backward(operands: list[Array], cotangents: list[Array]) -> tuple[Array, ...]:
        def moved(*values: Array) -> list[Array]:
            by_position = dict(zip(moving, values, strict=True))
            return program(*(by_position.get(i, x) for i, x in enumerate(operands)))

        _, transposed = jax.vjp(moved, *(operands[i] for i in moving))
        return transposed(cotangents)

    kinds = avals(program.arguments), avals(program.results)
    return has_parts(flat(Program.trace(backward, *kinds)), limits)


def attentions(pattern: Pattern) -> Iterator[Attention]:
    """Returns the attentions whose scores have more elements than queries, keys and values."""
    fixed = fixed_values(pattern.program)
    for equation in pattern.program.equations:
        if _is_batched(equation):
            attention = _attention(pattern, equation, fixed)
            if attention is not None:
                yield attention


def _is_batched(equation: Equation) -> bool:
    if equation.primitive.name != "dot_general":
        return False
    _, (batch, _) = equation.params["dimension_numbers"]
    return len(batch) > 0


def _attention(pattern: Pattern, first: Equation, fixed: set[Variable]) -> Attention | None:
    """Returns the attention that begins by a product of queries and keys."""
    inside: set[Any] = set(first.outvars)
    last: Equation | None = None
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
                inside.update(outs)
                queue += outs
    if last is None or not any(map(_is_exp, steps.values())):
        return None
    steps[id(last)] = last
    read = [v for step in steps.values() for v in variables(step.invars)]
    outside = [v for v in dict.fromkeys(read) if v not in inside and v not in fixed]
    smaller = [_smaller(pattern, v, first.outvars[0].aval.size, fixed) for v in outside]
    operands = list(dict.fromkeys(itertools.chain(*smaller)))
    ends = {v for step in (first, last) for v in variables(step.invars)} - inside
    (scores,) = first.outvars
    if scores.aval.size <= sum(v.aval.size for v in ends):
        return None
    program = pattern.slice(operands, last.outvars, scoped=True)
    return None if program is None else Attention(operands, last, program, scores)


def _smaller(
    pattern: Pattern, operand: Variable, size: int, fixed: Collection[Variable]
) -> list[Variable]:
    """Returns what cheap steps make an operand of as many elements as scores of, such as a mask.

    It is the operand itself if no smaller arrays give it.
    """
    pending, found = [operand], []
    while pending:
        value = pending.pop()
        if value.aval.size < size:
            found.append(value)
            continue
        equation = pattern.made_by.get(value)
        if equation is None or not is_cheap(equation):
            return [operand]
        pending += [v for v in variables(equation.invars) if v not in fixed]
    return found


def _is_step(equation: Equation) -> bool:
    return is_cheap(equation) or equation.primitive.name in REDUCTIONS or is_cheap_rule(equation)


def _is_exp(equation: Equation) -> bool:
    called = equation.params.get("call_jaxpr") or equation.params.get("jaxpr")
    if called is not None:
        return any(map(_is_exp, getattr(called, "jaxpr", called).eqns))
    return equation.primitive.name in ("exp", "exp2")
