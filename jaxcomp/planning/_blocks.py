"""Exact plans that recompute the first blocks of a model and keep more of the others."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from jaxcomp.planning._groups import Groups, is_in
from jaxcomp.planning._improve import margin
from jaxcomp.planning._probe import Probe
from jaxcomp.planning._search import Candidate


@dataclasses.dataclass(frozen=True)
class Level:
    """Bytes and time of a step.

    Attributes:
        bytes: What it needs.
        seconds: Its estimated time.
    """

    bytes: float
    seconds: float

    @classmethod
    def of(cls, result: Probe) -> "Level":
        """Returns the estimate of a compiled step."""
        return cls(result.report.total_bytes or 0, result.seconds)


@dataclasses.dataclass
class FirstBlocks:
    """Plans that apply `remat` to the first blocks, and `remat:weights` to the next ones.

    The other blocks stay as in `plain`. A block's share of the bytes and of the time is its share
    of what the plain step declares as saved.

    Attributes:
        micro_batches: Their number.
        shares: The share of each block, in order.
        plain: The step `plain`.
        remat: The step `remat`.
        weights: The step `remat:weights`; None if it was not compiled.
        more_bytes: Correction that is added to the estimated bytes.
        more_seconds: Correction that is added to the estimated time.
        tried: The specs of what was compiled.
    """

    micro_batches: int
    shares: Sequence[float]
    plain: Level
    remat: Level
    weights: Level | None = None
    more_bytes: float = 0.0
    more_seconds: float = 0.0
    tried: list[str] = dataclasses.field(default_factory=list)

    def propose(self, budget: float) -> tuple[float, str] | None:
        """Returns the fastest plan that may fit: its estimated time, and its spec."""
        fitting = [
            (level.seconds, spec)
            for spec, level in self._plans()
            if level.bytes <= budget and spec not in self.tried
        ]
        return min(fitting, default=None)

    def learn(self, spec: str, result: Probe, budget: float) -> float:
        """Corrects the estimates by a compiled plan; the error of its bytes, as a fraction."""
        level, expected = Level.of(result), dict(self._plans())[spec]
        self.tried.append(spec)
        self.more_bytes += level.bytes - expected.bytes + margin(level.bytes, budget)
        self.more_seconds += level.seconds - expected.seconds
        return (expected.bytes - level.bytes) / level.bytes

    def _plans(self) -> Iterator[tuple[str, Level]]:
        """Returns all plans, with what they are estimated to take."""
        until = [0.0, *itertools.accumulate(self.shares)]
        count = len(self.shares)
        for first in range(count + 1):
            for of_weights in range(count - first + 1 if self.weights is not None else 1):
                next_ones = until[first + of_weights] - until[first]
                yield _spec(first, of_weights, count), self._level(until[first], next_ones)

    def _level(self, remat: float, weights: float) -> Level:
        """Returns the estimate for shares of blocks under `remat` and `remat:weights`."""
        kept = self.weights or self.plain

        def of(name: str) -> float:
            plain, less, least = (getattr(x, name) for x in (self.plain, kept, self.remat))
            return float(plain + weights * (less - plain) + remat * (least - plain))

        return Level(of("bytes") + self.more_bytes, of("seconds") + self.more_seconds)


def _spec(first: int, of_weights: int, count: int) -> str:
    """Returns the spec of the first blocks under `remat` and the next under `remat:weights`.

    Example:
        >>> _spec(2, 0, 8), _spec(0, 3, 8), _spec(2, 6, 8), _spec(8, 0, 8), _spec(0, 0, 8)
        ('remat:2', 'remat:weights:3', 'remat:2+weights:6', 'remat', 'plain')
    """
    whole = {(0, 0): "plain", (count, 0): "remat", (0, count): "remat:weights"}
    if (first, of_weights) in whole:
        return whole[first, of_weights]
    if not of_weights:
        return f"remat:{first}"
    return f"remat:{first}+weights:{of_weights}" if first else f"remat:weights:{of_weights}"


def shares_of(groups: Groups, plain: Probe) -> list[float]:
    """Returns each block's share of the bytes that the plain step declares as saved in blocks.

    They are equal where the bytes of a block are not known, and empty without blocks.
    """
    sizes = [
        sum(size for group, size in plain.declared.items() if is_in(group, block))
        for block in groups.blocks
    ]
    sizes = sizes if all(sizes) else [1] * len(sizes)
    return [size / sum(sizes) for size in sizes]


def first_blocks(
    found: Sequence[Candidate], plain: Probe, recomputed: Probe | None, shares: Sequence[float]
) -> list[FirstBlocks]:
    """Returns exact plans that treat blocks in several ways, for each number of micro-batches."""
    if not shares or recomputed is None or not (plain.moments and recomputed.moments):
        return []
    of_weights = [c.result for c in found if c.name == "remat:weights" and c.result.moments]
    kept, least = Level.of(plain), Level.of(recomputed)
    weights = Level.of(of_weights[0]) if of_weights else None
    plans = [
        FirstBlocks(1, shares, kept, least, weights, tried=["plain", "remat", "remat:weights"])
    ]
    for count, split in _splits(found, kept, plain.report.argument_bytes or 0).items():
        split_least = _in_parts(least, kept, split, count)
        split_weights = None if weights is None else _in_parts(weights, kept, split, count)
        plans.append(FirstBlocks(count, shares, split, split_least, split_weights, tried=["plain"]))
    return plans


def seconds_of_each(plain: float, split: float, count: int) -> float:
    """Returns the seconds that each micro-batch but the first takes more.

    Args:
        plain: The time of the plain step.
        split: Its time in micro-batches.
        count: Their number.
    """
    return (split - plain) / (count - 1)


def _in_parts(level: Level, plain: Level, split: Level, count: int) -> Level:
    """Returns the estimate of a step in `count` micro-batches.

    `split` is the plain step in as many.
    """
    less = (level.bytes - plain.bytes) / count
    return Level(split.bytes + less, split.seconds + level.seconds - plain.seconds)


def _splits(found: Sequence[Candidate], plain: Level, given: float) -> dict[int, Level]:
    """Returns the plain step in micro-batches, by their number.

    For fewer than were compiled it is estimated: each micro-batch takes as much time more.

    Args:
        found: What was compiled.
        plain: The plain step.
        given: Bytes of the arguments, which are not split.
    """
    splits = {
        c.strategy.micro_batches: Level.of(c.result)
        for c in found
        if c.strategy.micro_batches > 1 and c.result.moments
    }
    if not splits:
        return {}
    least = min(splits)
    more_seconds = seconds_of_each(plain.seconds, splits[least].seconds, least)
    more_bytes = splits[least].bytes - given - (plain.bytes - given) / least
    fewer = {
        count: Level(
            given + (plain.bytes - given) / count + more_bytes,
            plain.seconds + more_seconds * (count - 1),
        )
        for count in itertools.takewhile(lambda n: n < least, (2**i for i in itertools.count(1)))
    }
    return fewer | splits
