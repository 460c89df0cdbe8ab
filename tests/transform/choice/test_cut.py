"""The minimum cut that chooses what is saved, beside all choices of small graphs."""

import collections
import itertools
import random
import sys

import pytest

from jaxcomp.transform._choice.cut import NEVER, cheapest


def _graph(seed):
    """What values are made of, what it costs to save and to compute them, and what is wanted."""
    rng = random.Random(seed)
    size = rng.randint(1, 9)
    made_of = {
        value: None if rng.random() < 0.3 else rng.choices(range(value), k=rng.randint(0, 3))
        for value in range(1, size)
    } | {0: None}
    cost = {value: rng.choice([1, 4, 8, 100, NEVER]) for value in range(size)}
    recompute_cost = {value: rng.choice([0, 0, 2, 5]) for value in range(size)}
    return made_of, cost, recompute_cost, [v for v in range(size) if rng.random() < 0.4]


def _total(stored, made_of, cost, recompute_cost, wanted):
    """What a choice costs; None if something wanted does not follow from it."""
    computed, queue = set(), list(wanted)
    while queue:
        value = queue.pop()
        if value in stored or value in computed:
            continue
        if made_of[value] is None:
            return None
        computed.add(value)
        queue += made_of[value]
    return sum(cost[v] for v in stored) + sum(recompute_cost[v] for v in computed)


@pytest.mark.parametrize("seed", range(150))
def test_no_choice_costs_less(seed):
    made_of, cost, recompute_cost, wanted = _graph(seed)
    storable = [value for value in made_of if cost[value] < NEVER]
    totals = [
        _total(set(stored), made_of, cost, recompute_cost, wanted)
        for count in range(len(storable) + 1)
        for stored in itertools.combinations(storable, count)
    ]
    least = min((total for total in totals if total is not None), default=None)
    arguments = wanted, made_of.get, cost.get, recompute_cost.__getitem__
    if least is None:
        with pytest.raises(ValueError, match="neither stored nor computed"):
            cheapest(*arguments)
    else:
        stored, _ = cheapest(*arguments)
        assert _total(stored, made_of, cost, recompute_cost, wanted) == least


def test_work_grows_linearly_with_repeated_blocks():
    def work(blocks):
        """Calls of functions, built-in ones too, during a search."""
        made_of = {0: None}
        for first in range(0, 4 * blocks, 4):
            made_of |= {first + 1: [first], first + 2: [first + 1], first + 3: None}
            made_of |= {first + 4: [first, first + 3]}
        events = collections.Counter()
        sys.setprofile(lambda frame, event, _: events.update([event]))
        try:
            stored, _ = cheapest(list(made_of), made_of.get, lambda value: 3 + value % 2)
        finally:
            sys.setprofile(None)
        assert len(stored) == blocks + 1
        return events.total()

    assert work(800) < 9 * work(100)
