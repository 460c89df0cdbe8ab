"""The order of recognized operations and of the equations around them."""

import heapq
from collections.abc import Sequence
from typing import Any

from jax.extend.core import DropVar

from jaxcomp.transform._program.program import Program, variables
from jaxcomp.transform._program.types import Equation
from jaxcomp.transform._recognition.unit import NormCurve, Recognized


def ordered(program: Program, units: Sequence[Recognized]) -> list[Any] | None:
    """Returns units and the other equations that are needed, each after those that it reads.

    None if there is no such order, because a unit reads what depends on its results. The order is
    that of the program, as far as possible. Without units it is the program's.
    """
    made_by_units = {v for r in units for v in r.unit.results}
    position = {id(e): i for i, e in enumerate(program.equations)}
    steps: list[tuple[int, Any, list[Any], list[Any]]] = [
        (i, e, variables(e.invars), [v for v in e.outvars if not isinstance(v, DropVar)])
        for i, e in enumerate(program.equations)
        if not made_by_units.intersection(e.outvars)
    ]
    for recognized in units:
        unit = recognized.unit
        equation: Equation | None = unit.equation
        if isinstance(unit, NormCurve):  # it comes before others that may read the code of `x`
            equation = program.made_by.get(unit.norm.x)
        number = -1 if equation is None else position[id(equation)]
        steps.append((number, recognized, unit.operands, unit.results))
    maker: dict[Any, Any] = {v: step for step in steps for v in step[3]}
    # What is needed.
    live, pending = set[int](), list(variables(program.results))
    effects = [s for s in steps if getattr(s[1], "effects", None)]
    for step in effects:
        live.add(id(step))
        pending += step[2]
    while pending:
        needed = maker.get(pending.pop())
        if needed is not None and id(needed) not in live:
            live.add(id(needed))
            pending += needed[2]
    chosen = [s for s in steps if id(s) in live]
    waits = {id(s): len({id(maker[v]) for v in s[2] if v in maker}) for s in chosen}
    after: dict[int, list[Any]] = {}
    for step in chosen:
        for number in {id(maker[v]) for v in step[2] if v in maker}:
            after.setdefault(number, []).append(step)
    ready = [(s[0], n, s) for n, s in enumerate(chosen) if not waits[id(s)]]
    count = len(chosen)
    heapq.heapify(ready)
    order = []
    while ready:
        *_, step = heapq.heappop(ready)
        order.append(step[1])
        for following in after.get(id(step), ()):
            waits[id(following)] -= 1
            if not waits[id(following)]:
                count += 1
                heapq.heappush(ready, (following[0], count, following))
    return order if len(order) == len(chosen) else None
