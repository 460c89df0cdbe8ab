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
    network = _Network()
    source, sink = network.node(), network.node()
    before: dict[V, int] = {}  # the node that a value's way in ends at; the next is its way out
    edges: dict[V, int] = {}  # between both

    def way_out(value: V) -> int:
        if value not in before:
            before[value] = network.node()
            network.node()
            queue.append(value)
        return before[value] + 1

    queue: list[V] = []
    for value in wanted:
        network.edge(way_out(value), sink, NEVER)
    while queue:
        value = queue.pop()
        node = before[value]
        edges[value] = network.edge(node, node + 1, max(1, cost(value)))
        parents = made_of(value)
        network.edge(source, node, NEVER if parents is None else recompute_cost(value))
        for parent in parents or ():
            network.edge(way_out(parent), node, NEVER)
    network.fill(source, sink)
    after = network.distances(sink, backwards=True)
    flows = {v: node for v, node in before.items() if network.flow(edges[v]) > 0}
    stored = {v for v, node in flows.items() if node + 1 in after and node not in after}
    return Cut(stored, {v for v, node in before.items() if node in after})


class _Network:
    """Nodes, and edges with the flow that they can still take.

    Each edge has one back, of the next number, that can take what flows in the edge.
    """

    def __init__(self) -> None:
        self._edges: list[list[int]] = []  # that begin at each node
        self._end: list[int] = []  # of each edge
        self._room: list[int] = []

    def node(self) -> int:
        """Adds a node, and returns its number."""
        self._edges.append([])
        return len(self._edges) - 1

    def edge(self, start: int, end: int, capacity: int) -> int:
        """Adds an edge, and returns its number."""
        number = len(self._end)
        self._edges[start].append(number)
        self._edges[end].append(number + 1)
        self._end += end, start
        self._room += capacity, 0
        return number

    def flow(self, edge: int) -> int:
        """Returns what flows in an edge."""
        return self._room[edge + 1]

    def fill(self, source: int, sink: int) -> None:
        """Lets flow from a source to a sink what can (E. Dinic, 1970).

        Raises:
            ValueError: If there is no bound.
        """
        while sink in (distance := self.distances(source)):
            if not self._fill_shortest(source, sink, distance):
                raise ValueError("a value is needed that can be neither stored nor computed again")

    def distances(self, start: int, *, backwards: bool = False) -> dict[int, int]:
        """Returns the distance of each node that more flow can reach, or that can reach `start`."""
        distance = {start: 0}
        queue = collections.deque([start])
        while queue:
            node = queue.popleft()
            for edge in self._edges[node]:
                end = self._end[edge]
                if end not in distance and self._room[edge ^ 1 if backwards else edge] > 0:
                    distance[end] = distance[node] + 1
                    queue.append(end)
        return distance

    def _fill_shortest(self, source: int, sink: int, distance: dict[int, int]) -> bool:
        """Fills all shortest paths; False if one has no bound."""
        rest = {node: iter(self._edges[node]) for node in distance}
        path: list[int] = []
        node = source
        while True:
            if node == sink:
                flow = min(self._room[edge] for edge in path)
                if flow >= NEVER // 2:  # what other paths have taken is less
                    return False
                for edge in path:
                    self._room[edge] -= flow
                    self._room[edge ^ 1] += flow
                full = next(i for i, edge in enumerate(path) if not self._room[edge])
                node = self._end[path[full] ^ 1]
                del path[full:]
            nearer = distance[node] + 1
            for edge in rest[node]:
                if self._room[edge] > 0 and distance.get(self._end[edge]) == nearer:
                    path.append(edge)
                    node = self._end[edge]
                    break
            else:
                if not path:
                    return True
                node = self._end[path.pop() ^ 1]
