"""Segments of long chains of cheap steps, each of which is recomputed once."""

from collections.abc import Set
from typing import Any

from jaxcomp.transform._graph import Graph

_LENGTH = 64  # steps


class Segments:
    """Divides what is recomputed by its distance, in steps, from what is saved or held.

    Cheap steps are recomputed for each coefficient anew as long as no chain of them is longer than
    a segment: XLA fuses them into the kernel that reads the coefficient. For longer chains that
    would take quadratic work. There the values that a later segment reads are kept once they are
    computed, and of the segment at hand all values. So each step is taken at most twice.

    Args:
        graph: The forward program.
        available: The values that are saved, held by the caller, or constant.
    """

    def __init__(self, graph: Graph, available: Set[Any]) -> None:
        distance: dict[Any, int] = dict.fromkeys(available, 0)
        for value in graph.order:
            if value not in distance:
                operands = graph.operands(value)
                distance[value] = 1 + max((distance.get(v, 0) for v in operands), default=0)
        self._number = {value: steps // _LENGTH for value, steps in distance.items()}
        self._are_long = max(self._number.values(), default=0) > 0
        self._crossing: set[Any] = set()
        if self._are_long:
            for value in graph.order:
                later = (v for v in graph.operands(value) if self.number(v) < self.number(value))
                self._crossing.update(later)

    def number(self, value: Any) -> int:
        """The segment of a value; 0 is next to what is saved."""
        return self._number.get(value, 0)

    def is_shared(self, value: Any, own: int) -> bool:
        """Whether a value is kept for other coefficients, once one of segment `own` needs it."""
        return self._are_long and (value in self._crossing or self.number(value) == own)
