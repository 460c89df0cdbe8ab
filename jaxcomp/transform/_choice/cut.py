"""The cheapest set of values from which others can be computed: a minimum cut."""

import collections
import itertools
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

V = TypeVar("V", bound=Hashable)

Residual = dict[Hashable, dict[Hashable, int]]  # what an edge can still take

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
    residual: Residual = collections.defaultdict(dict)

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
    while distance := _distances(residual, source, sink):
        if not _block(residual, source, sink, distance):
            raise ValueError("a value is needed that can be neither stored nor computed again")
    backwards: Residual = collections.defaultdict(dict)
    for start, ends in residual.items():
        for end, capacity in ends.items():
            backwards[end][start] = capacity
    after = _distances(backwards, sink)
    flows = {v for v in seen if residual[v, "out"][v, "in"] > 0}
    stored = {v for v in flows if (v, "out") in after and (v, "in") not in after}
    return Cut(stored, {v for v in seen if (v, "in") in after})


def _distances(residual: Residual, source: Hashable, sink: Hashable = None) -> dict[Hashable, int]:
    """Returns the distance of every node that flow can still reach.

    It is empty if the sink is not one.
    """
    distance: dict[Hashable, int] = {source: 0}
    queue = collections.deque([source])
    while queue:
        node = queue.popleft()
        for other, capacity in residual[node].items():
            if capacity > 0 and other not in distance:
                distance[other] = distance[node] + 1
                queue.append(other)
    return distance if sink is None or sink in distance else {}


def _block(
    residual: Residual, source: Hashable, sink: Hashable, distance: dict[Hashable, int]
) -> bool:
    """Fills all shortest paths (E. Dinic, 1970); False if one has no bound."""
    rest = {node: iter(list(residual[node])) for node in distance}
    path = [source]
    while path:
        node = path[-1]
        if node is sink:
            steps = list(itertools.pairwise(path))
            flow = min(residual[a][b] for a, b in steps)
            if flow >= NEVER // 2:  # what other paths have taken is less
                return False
            for a, b in steps:
                residual[a][b] -= flow
                residual[b][a] += flow
            full = next(i for i, (a, b) in enumerate(steps) if not residual[a][b])
            del path[full + 1 :]
            continue
        nearer = distance[node] + 1
        steps_on = (n for n in rest[node] if residual[node][n] > 0 and distance.get(n) == nearer)
        following = next(steps_on, None)
        if following is None:
            path.pop()
        else:
            path.append(following)
    return True
