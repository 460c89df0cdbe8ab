"""The verdict on compiled strategies, for `memory`, `compare` and `fit` alike."""

import dataclasses
import itertools

import pytest

from jaxcomp.planning._strategies import Strategy
from jaxcomp.planning._verdict import ERROR, Option, Room, choose, explain

ROOM = Room(100, 10, "h100")


def options(**rows):
    """Options by spec, with `__` for `:` and `_` for `=`: bytes and cost."""
    found = []
    for name, (total, cost) in rows.items():
        spec = name.replace("__", ":").replace("bits_", "bits=")
        strategy = Strategy.parse(spec)
        found.append(Option(spec, total, cost, strategy.is_exact, strategy.is_unchanged))
    return found


CASES = {
    "plain fits, though others are faster and smaller": (
        options(plain=(90, 1.0), fused__bits_4=(20, 0.5), remat=(30, 0.9)),
        "plain",
    ),
    "plain fits without the allowance alone": (
        options(plain=(91, 1.0), remat=(50, 1.2)),
        "remat",
    ),
    "codes are faster by more than the error": (
        options(plain=(200, 1.0), fused__bits_4=(30, 1.0), remat=(20, 1.12)),
        "fused:bits=4",
    ),
    "a tie goes to the exact one": (
        options(plain=(200, 1.0), fused__bits_4=(20, 1.0), remat=(50, 1.10)),
        "remat",
    ),
    "a tie goes to the fastest exact one": (
        options(fused__bits_4=(20, 1.0), remat=(30, 1.10), accumulate__4=(40, 1.05)),
        "accumulate:4",
    ),
    "what is alike goes to the most headroom": (
        options(remat__14=(89, 1.00), remat__15=(60, 1.005), remat=(20, 1.08)),
        "remat:15",
    ),
    "opened regions of the author may be faster": (
        options(plain=(20, 1.0), open=(50, 0.9), remat=(10, 0.5)),
        "open",
    ),
    "opened regions that are alike are not worth their bytes": (
        options(plain=(20, 1.0), open=(50, 0.99)),
        "plain",
    ),
    "inputs of regions in codes are not exact": (
        options(boundary__quantize__bits_8=(20, 1.0), remat=(30, 1.05)),
        "remat",
    ),
    "the policy exact changes what is saved": (
        options(exact=(20, 0.8), plain=(90, 1.0)),
        "plain",
    ),
    "nothing fits": (options(plain=(200, 1.0), remat=(91, 1.2)), None),
}


@pytest.mark.parametrize("case", CASES)
def test_the_answer(case):
    rows, answer = CASES[case]
    for order in itertools.permutations(rows):
        chosen = choose(order, ROOM)
        assert (chosen and chosen.name) == answer
        assert explain(order, ROOM).startswith(f"Answer: {answer}" if answer else "Nothing fits")


def test_words():
    plain = explain(options(plain=(90, 1.0), remat=(30, 0.9)), ROOM)
    assert plain == (
        "Answer: plain. The step fits as it is: it needs 90 B of the 100 B of h100, with 10 B left "
        "for all but XLA's buffers. Nothing needs to be changed."
    )
    exact = explain(options(plain=(200, 1.0), fused__bits_4=(20, 1.0), remat=(50, 1.1)), ROOM)
    assert exact.endswith(
        "remat needs 50 B; plain needs 200 B, which does not fit; 1.10 of plain's estimated time, "
        f"which errs by up to {ERROR:.0%}; fused:bits=4 may take less time, but this is exact."
    )
    unknown = explain(options(plain=(90, 1.0)), dataclasses.replace(ROOM, usable_bytes=None))
    assert unknown == "What fits on h100 is not known: give a capacity, such as 11GiB."
    no_cost = explain(options(remat=(50, None), open=(200, None)), ROOM, figure="HBM traffic")
    assert "with a HBM traffic that is not known: remat" in no_cost
    assert explain([], ROOM) == "No row could be compiled."
