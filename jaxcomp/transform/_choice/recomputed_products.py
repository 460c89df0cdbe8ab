"""Which products of a kept region wait for their derivative, and which are made once more.

The forward pass makes all products of a region under `jax.checkpoint`, and the backward pass makes
them again. There those before an attention wait while the attention is differentiated.
"""

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

from jaxcomp.memory._flops import equations_flops
from jaxcomp.memory._tracing import CHECKPOINT_PRIMITIVES
from jaxcomp.transform._choice.decisions import Decision
from jaxcomp.transform._choice.graph import nbytes
from jaxcomp.transform._pieces.limits import Limits
from jaxcomp.transform._program.linearized import Linearized
from jaxcomp.transform._program.primitives import HEAVY, tangents_of
from jaxcomp.transform._program.program import Program, needed, passed, variables
from jaxcomp.transform._program.types import Equation, Variable


def with_recomputed_products(
    linearized: Linearized, decisions: dict[Variable, Decision], limits: Limits
) -> dict[Variable, Decision]:
    """Leaves it open for products before the last attention whether they wait.

    Those of the fewest FLOPs a byte come first, and of equal ones those that wait the longest. All
    FLOPs of the region's passes stay within `limits.work` times those under `jax.checkpoint`.
    """
    equations = needed(linearized.forward.equations, linearized.forward.results)
    recomputed = _recomputed_flops(linearized)
    twice, backward = 2 * _flops(equations), _flops(linearized.linear.equations) - recomputed
    left = (limits.work - 1) * (twice + backward) - recomputed
    if not math.isfinite(left):
        return decisions
    products = [
        equation
        for equation in _before_last_attention(equations, linearized)
        if all(v in decisions and decisions[v].action == "either" for v in equation.outvars)
    ]
    opened: dict[Variable, Decision] = {}
    for equation in sorted(products, key=_flops_of_byte):
        flops = _flops([equation])
        if flops <= left:
            left -= flops
            for value in equation.outvars:
                opened[value] = dataclasses.replace(decisions[value], action="cheapest")
    return decisions | opened


def _before_last_attention(equations: Sequence[Equation], linearized: Linearized) -> list[Equation]:
    """Returns the products before those that make what the last attention reads."""
    calls = [e for e in linearized.linear.equations if _is_checkpoint(e)]
    if not calls:
        return []
    behind = dict(zip(linearized.linear.arguments, linearized.coefficients, strict=False))
    made_by = {v: (i, e) for i, e in enumerate(equations) for v in e.outvars}
    read = [behind.get(v) for v in variables(calls[-1].invars)]
    pending: list[Any] = [v for v in read if v in made_by]
    seen: set[Any] = set()
    first = len(equations)
    while pending:
        value = pending.pop()
        if value in seen or value not in made_by:
            continue
        seen.add(value)
        index, equation = made_by[value]
        if equation.primitive.name in HEAVY:
            first = min(first, index)
        else:
            pending += variables(equation.invars)
    return [e for e in equations[:first] if e.primitive.name in HEAVY]


def _is_checkpoint(equation: Equation) -> bool:
    return equation.primitive.name in CHECKPOINT_PRIMITIVES


def _recomputed_flops(linearized: Linearized) -> float:
    """Returns the FLOPs of what the calls of `jax.checkpoint` in a linear program make again."""
    linear = linearized.linear
    tangents = tangents_of(linear.equations, linear.arguments[len(linearized.coefficients) :])
    return sum(
        _flops(_without_tangents(equation, tangents))
        for equation in linear.equations
        if _is_checkpoint(equation)
    )


def _without_tangents(call: Equation, tangents: Collection[Variable]) -> list[Equation]:
    """Returns the equations in a call of `jax.checkpoint` that no tangent reaches."""
    body = Program.of(call.params["jaxpr"])
    reached = tangents_of(body.equations, passed(body, call, tangents))
    return [equation for equation in body.equations if reached.isdisjoint(equation.outvars)]


def _flops(equations: Sequence[Equation]) -> float:
    """Returns the FLOPs of equations, or infinity if they are not known."""
    flops = equations_flops(equations, "cuda")
    return math.inf if flops is None else flops


def _flops_of_byte(equation: Equation) -> float:
    return _flops([equation]) / max(1, sum(nbytes(v.aval) for v in equation.outvars))
