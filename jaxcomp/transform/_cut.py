"""The cheapest set of values from which others can be computed: a minimum cut."""

import collections
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

V = TypeVar("V", bound=Hashable)

NEVER = 1 << 62  # the cost of what cannot be stored


class Cut(NamedTuple, Generic[V]):
    """What is stored, and what is computed from it.

    Attributes:
        stored: The values to store.
        computed: Those to compute, on the way to what is wanted.
    """

    stored: set[V]
    computed: set[V]


def cheapest(
    wanted: Collection[V],
    made_of: Callable[[V], Sequence[V] | None],
    cost: Callable[[V], int],
    recompute_cost: Callable[[V], int] = lambda value: 0,
) -> Cut[V]:
    """Chooses what to store so that all that is wanted can be had.

    Of equally cheap choices it is the one nearest to what is wanted, so that little is computed
    again: of a sum of many values the sum.

    Args:
        wanted: The values that must be stored or computed.
        made_of: What a value is computed from; None if it cannot be computed again.
        cost: Of storing a value; `NEVER` if it cannot be stored.
        recompute_cost: Of computing it again.

    Returns:
        The values to store, and those to compute.

    Raises:
        ValueError: If something wanted can be neither stored nor computed.

    Example:
        >>> parents = {"y": ["x", "mask"], "z": ["x"]}
        >>> costs = {"x": 4, "y": 4, "z": 4, "mask": 1}
        >>> sorted(cheapest(["y", "z"], parents.get, costs.get).stored)
        ['mask', 'x']
        >>> costs, recompute_costs = costs | {"z": 5}, {"y": 4, "z": 0}
        >>> sorted(cheapest(["y", "z"], parents.get, costs.get, recompute_costs.__getitem__).stored)
        ['x', 'y']
    """
    residual: dict[Hashable, dict[Hashable, int]] = collections.defaultdict(dict)

    def edge(start: Hashable, end: Hashable, capacity: int) -> None:
        residual[start][end] = residual[start].get(end, 0) + capacity
        residual[end].setdefault(start, 0)

    source, sink = object(), object()
    seen = set(wanted)
    queue = list(wanted)
    for value in wanted:
        edge((value, "out"), sink, NEVER)
    while queue:
        value = queue.pop()
        edge((value, "in"), (value, "out"), max(1, cost(value)))
        parents = made_of(value)
        if parents is None:
            edge(source, (value, "in"), NEVER)
            continue
        edge(source, (value, "in"), recompute_cost(value))
        for parent in parents:
            edge((parent, "out"), (value, "in"), NEVER)
            if parent not in seen:
                seen.add(parent)
                queue.append(parent)
    while path := _shortest(residual, source, sink):
        flow = min(residual[a][b] for a, b in path)
        if flow >= NEVER:
            raise ValueError("a value is needed that can be neither stored nor computed again")
        for a, b in path:
            residual[a][b] -= flow
            residual[b][a] += flow
    backwards: dict[Hashable, dict[Hashable, int]] = collections.defaultdict(dict)
    for start, ends in residual.items():
        for end, capacity in ends.items():
            backwards[end][start] = capacity
    after = _reached(backwards, sink)
    flows = {v for v in seen if residual[v, "out"][v, "in"] > 0}
    stored = {v for v in flows if (v, "out") in after and (v, "in") not in after}
    return Cut(stored, {v for v in seen if (v, "in") in after})


def _reached(
    residual: dict[Hashable, dict[Hashable, int]], source: Hashable
) -> dict[Hashable, Hashable]:
    """Every node that flow can still reach, with the node before it."""
    before: dict[Hashable, Hashable] = {source: source}
    queue = collections.deque([source])
    while queue:
        node = queue.popleft()
        for other, capacity in residual[node].items():
            if capacity > 0 and other not in before:
                before[other] = node
                queue.append(other)
    return before


def _shortest(
    residual: dict[Hashable, dict[Hashable, int]], source: Hashable, sink: Hashable
) -> list[tuple[Hashable, Hashable]]:
    before = _reached(residual, source)
    path = []
    node = sink
    while node in before and node is not source:
        path.append((before[node], node))
        node = before[node]
    return path
