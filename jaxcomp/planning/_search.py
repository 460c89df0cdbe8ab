"""The strategies that were compiled on the way to a plan."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxcomp.memory._compiling import fingerprint
from jaxcomp.memory._targets import Target
from jaxcomp.memory._tracing import TracedStep
from jaxcomp.planning._compiled import Compiled
from jaxcomp.planning._groups import Groups
from jaxcomp.planning._measured import measured_seconds
from jaxcomp.planning._noise import Noise
from jaxcomp.planning._probe import Probe, declared_bytes, probe, trace_scoped
from jaxcomp.planning._strategies import Strategy
from jaxcomp.planning._verdict import Option, Room, choose
from jaxcomp.planning._watched import MakeStep

_CORES = 2  # of a compilation
_MOST = 64
_remembered: dict[Any, Probe] = {}  # compiled steps, for further budgets


@dataclasses.dataclass
class Candidate:
    """A strategy that was compiled.

    Attributes:
        name: What it is called.
        strategy: The strategy.
        result: What the compiler made of it.
        assignment: What a plan does with each group; None for other strategies.
        measured: Seconds of a step on the attached device; None if it was not run.
    """

    name: str
    strategy: Strategy
    result: Probe
    assignment: Mapping[str, str] | None = None
    measured: float | None = None

    @property
    def is_noisy(self) -> bool:
        """Whether it encodes values, so that its gradient has noise."""
        return not self.strategy.is_exact


@dataclasses.dataclass
class Search:
    """Compiles strategies, at most so many.

    Attributes:
        make_step: The step factory.
        batch: The batch size.
        target: What is compiled for.
        budget: Bytes that a step may need.
        compiles: How many strategies may be compiled.
        progress: Is entered with a strategy's name while it is compiled.
        groups: The groups of the model.
        admits: Whether a strategy of all values alike may be the answer.
        most_noise: The largest standard deviation that codes may add to the gradient, in units of
            SGD's.
        noise: Of the codes; None as long as it is not measured.
        ready: Steps that were traced ahead of their turn, by spec, and whether XLA may recompute.
        found: What was compiled.
        errors: The error of the estimated bytes of each plan, as a fraction.
        notes: What was not tried, and why.
        report: Is called with each strategy that was compiled.
    """

    make_step: MakeStep
    batch: int
    target: Target
    budget: int
    compiles: int
    progress: Callable[[str], contextlib.AbstractContextManager[Any]]
    groups: Groups
    admits: Callable[[Strategy], bool]
    most_noise: float = math.inf
    noise: Noise | None = None
    ready: dict[str, tuple[TracedStep, bool]] = dataclasses.field(default_factory=dict)
    found: list[Candidate] = dataclasses.field(default_factory=list)
    errors: list[float] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    report: Callable[[Compiled], Any] | None = None

    def compile(
        self, name: str, strategy: Strategy, assignment: Mapping[str, str] | None = None
    ) -> Probe:
        """Compiles a strategy and remembers it."""
        with self.progress(name):
            traced = self.ready.pop(strategy.spec, None) or self._traced_for(strategy)
            result = self._probe(*traced)
        self.found.append(Candidate(name, strategy, result, assignment))
        if self.report is not None:
            self.report(self.compiled(self.found[-1]))
        return result

    def _traced_for(self, strategy: Strategy) -> tuple[TracedStep, bool]:
        """Returns a traced strategy, and whether XLA may recompute values on its own.

        The plain step is planned from: it is compiled as if it fitted, which compilers for TPUs
        refuse.
        """
        xla_remat = not strategy.is_plain or self.target.platform == "tpu"
        traced, _ = trace_scoped(self.make_step, strategy, self.batch, self.target)
        return traced, xla_remat

    def _probe(self, traced: TracedStep, xla_remat: bool) -> Probe:
        key = fingerprint(traced, self.target), self.groups, xla_remat
        if key not in _remembered:
            result = probe(traced, self.target, None, self.groups, xla_remat=xla_remat)
            _remembered[key] = result
            if len(_remembered) > _MOST:
                del _remembered[next(iter(_remembered))]
        return _remembered[key]

    def declared(self, strategy: Strategy) -> Mapping[str, int]:
        """Returns the bytes that a step intends to save, by group.

        It is traced for its compilation, too.
        """
        ready = self._traced_for(strategy)
        self.ready[strategy.spec] = ready
        return declared_bytes(ready[0], self.groups)

    @property
    def left(self) -> int:
        """How many more may be compiled."""
        return self.compiles - len(self.found)

    def fits(self, result: Probe) -> bool:
        """Returns whether a compiled step fits the budget."""
        total = result.report.total_bytes
        return bool(result.moments) and total is not None and total <= self.budget

    def noise_of(self, candidate: Candidate) -> float | None:
        """Returns the estimated noise of a strategy's gradient over SGD's.

        It is None if it was not measured.
        """
        if self.noise is None:
            return None
        if candidate.assignment is not None:
            return math.sqrt(self.noise.total(candidate.assignment))
        return math.sqrt(self.noise.everywhere(candidate.name))

    def is_quiet(self, candidate: Candidate) -> bool:
        """Returns whether the noise of a strategy is within its limit."""
        return (self.noise_of(candidate) or 0.0) <= self.most_noise

    def fitting(self) -> list[Candidate]:
        """Returns what fits and is allowed, the fastest first.

        Of equally fast ones the exact one.
        """
        found = [
            c
            for c in self.found
            if self.fits(c.result)
            and (c.assignment is not None or self.admits(c.strategy))
            and self.is_quiet(c)
        ]
        return sorted(found, key=lambda c: (c.result.seconds, c.is_noisy))

    def compiled(self, candidate: Candidate) -> Compiled:
        """Returns the figures of a candidate."""
        return Compiled(
            candidate.name,
            candidate.result.report.total_bytes or 0,
            1e3 * candidate.result.seconds,
            self.fits(candidate.result),
            not candidate.is_noisy,
            self.noise_of(candidate),
            None if candidate.measured is None else 1e3 * candidate.measured,
        )

    def option(self, candidate: Candidate) -> Option:
        """Returns a candidate as an option of the verdict."""
        return Option(
            candidate.name,
            candidate.result.report.total_bytes or 0,
            candidate.result.seconds,
            not candidate.is_noisy,
            candidate.strategy.is_unchanged,
        )

    def answer(self) -> Candidate | None:
        """Returns what is chosen of what fits: by measured times if some were run."""
        fitting = self.fitting()
        if any(candidate.measured is not None for candidate in fitting):
            return self.best()
        chosen = choose([self.option(c) for c in fitting], Room(self.budget, 0, self.target.name))
        return next((c for c in fitting if chosen is not None and c.name == chosen.name), None)

    def best(self) -> Candidate | None:
        """Returns the fastest that fits.

        By its measured time if some were run, else by the estimate.
        """
        fitting = self.fitting()
        timed = [c for c in fitting if c.measured is not None]
        if timed:
            return min(timed, key=lambda c: c.measured or 0.0)
        return fitting[0] if fitting else None

    def measure(self, count: int) -> None:
        """Runs the steps that are estimated to be the fastest of what fits."""
        for candidate in self.fitting()[:count]:
            with self.progress(f"running {candidate.name}"):
                candidate.measured = measured_seconds(
                    self.make_step, candidate.strategy, self.batch
                )

    def prepare(self, strategies: Sequence[Strategy]) -> None:
        """Compiles strategies for an absent target at once, where there are cores for it."""
        workers = (os.cpu_count() or 1) // _CORES
        if self.target.attached or workers < 2:
            return
        with ThreadPoolExecutor(workers) as pool:
            for strategy in strategies:
                with contextlib.suppress(Exception):  # which is told when its turn comes
                    self.ready[strategy.spec] = self._traced_for(strategy)
                    pool.submit(self._probe, *self.ready[strategy.spec])
