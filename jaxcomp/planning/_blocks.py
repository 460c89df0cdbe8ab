"""Exact plans that recompute the first blocks of a model and keep more of the others."""

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from flax import nnx

from jaxcomp.planning._groups import block_of
from jaxcomp.planning._improve import MARGIN
from jaxcomp.planning._probe import Probe
from jaxcomp.planning._search import Candidate
from jaxcomp.transform._remat import blocks_of


@dataclasses.dataclass(frozen=True)
class Level:
    """A step whose blocks are all treated alike.

    Attributes:
        bytes: What it needs.
        seconds: Its estimated time.
    """

    bytes: float
    seconds: float

    @classmethod
    def of(cls, result: Probe) -> "Level":
        """That of a compiled step."""
        return cls(result.report.total_bytes or 0, result.seconds)


@dataclasses.dataclass
class FirstBlocks:
    """Plans that recompute the first blocks, and keep products with weights of the next ones.

    All of the others is kept. A block's part of the bytes and of the time is its part of what the
    plain step saves.

    Attributes:
        micro_batches: Their number.
        parts: The part of each block, in order.
        plain: The step that keeps all.
        remat: The step that recomputes all blocks.
        weights: The step that keeps the products with weights of all blocks; None if it was not
            compiled.
        more_bytes: What a compiled step takes beyond the estimate.
        more_seconds: The same of its estimated time.
        tried: The specs of what was compiled.
    """

    micro_batches: int
    parts: Sequence[float]
    plain: Level
    remat: Level
    weights: Level | None = None
    more_bytes: float = 0.0
    more_seconds: float = 0.0
    tried: list[str] = dataclasses.field(default_factory=list)

    def propose(self, budget: float) -> tuple[float, str] | None:
        """The fastest plan that may fit: its estimated time, and its spec."""
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
        self.more_bytes += level.bytes - expected.bytes
        self.more_bytes += MARGIN * budget if level.bytes > budget else 0.0
        self.more_seconds += level.seconds - expected.seconds
        return (expected.bytes - level.bytes) / level.bytes

    def _plans(self) -> Iterator[tuple[str, Level]]:
        """All plans, with what they are estimated to take."""
        until = [0.0, *itertools.accumulate(self.parts)]
        count = len(self.parts)
        for first in range(count + 1):
            for of_weights in range(count - first + 1 if self.weights is not None else 1):
                shares = until[first], until[first + of_weights] - until[first]
                yield _spec(first, of_weights, count), self._level(*shares)

    def _level(self, remat: float, weights: float) -> Level:
        """What a plan takes that recomputes such parts of the blocks."""
        kept = self.weights or self.plain

        def of(name: str) -> float:
            plain, less, least = (getattr(x, name) for x in (self.plain, kept, self.remat))
            return float(plain + weights * (less - plain) + remat * (least - plain))

        return Level(of("bytes") + self.more_bytes, of("seconds") + self.more_seconds)


def _spec(first: int, of_weights: int, count: int) -> str:
    """The strategy that recomputes so many of the blocks.

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


def parts_of(models: Sequence[Any], plain: Probe) -> list[float]:
    """Of what the blocks of a model save the part of each; empty if it has no blocks."""
    if len(models) != 1 or not isinstance(models[0], nnx.Module):
        return []
    saved: collections.Counter[str] = collections.Counter()
    for group, size in plain.declared.items():
        saved[block_of(group)] += size
    sizes = [saved[path] for path in blocks_of(models[0])]
    return [size / sum(sizes) for size in sizes] if any(sizes) else []


def first_blocks(
    found: Sequence[Candidate], plain: Probe, recomputed: Probe | None, parts: Sequence[float]
) -> list[FirstBlocks]:
    """The exact plans that treat blocks in more than one way, for each number of micro-batches."""
    if not parts or recomputed is None or not (plain.moments and recomputed.moments):
        return []
    of_weights = [c.result for c in found if c.name == "remat:weights" and c.result.moments]
    kept, least = Level.of(plain), Level.of(recomputed)
    weights = Level.of(of_weights[0]) if of_weights else None
    plans = [FirstBlocks(1, parts, kept, least, weights, tried=["plain", "remat", "remat:weights"])]
    for candidate in found:
        count = candidate.strategy.micro_batches
        if count > 1 and candidate.result.moments:
            split = Level.of(candidate.result)

            def of_part(level: Level, count: int = count, split: Level = split) -> Level:
                less = (level.bytes - kept.bytes) / count
                return Level(split.bytes + less, split.seconds + level.seconds - kept.seconds)

            levels = split, of_part(least), None if weights is None else of_part(weights)
            plans.append(FirstBlocks(count, parts, *levels, tried=["plain"]))
    return plans
