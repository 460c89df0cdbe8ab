"""The strategies that were compiled on the way to a plan."""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from jaxcomp.memory._compiling import fingerprint
from jaxcomp.memory._targets import Target
from jaxcomp.memory._tracing import TracedStep
from jaxcomp.planning._groups import Groups
from jaxcomp.planning._noise import Noise
from jaxcomp.planning._probe import Probe, declared_bytes, probe, trace_scoped
from jaxcomp.planning._strategies import Strategy
from jaxcomp.planning._watched import MakeStep

_MOST = 64
_remembered: dict[Any, Probe] = {}  # compiled steps, for further budgets


@dataclass
class Candidate:
    """A strategy that was compiled.

    Attributes:
        name: What it is called.
        strategy: The strategy.
        result: What the compiler made of it.
        assignment: What a plan does with each group; None for other strategies.
    """

    name: str
    strategy: Strategy
    result: Probe
    assignment: Mapping[str, str] | None = None


@dataclass
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
        found: What was compiled.
        errors: The error of the estimated bytes of each plan, as a fraction.
        notes: What was not tried, and why.
    """

    make_step: MakeStep
    batch: int
    target: Target
    budget: int
    compiles: int
    progress: Callable[[str], AbstractContextManager[Any]]
    groups: Groups
    admits: Callable[[Strategy], bool]
    most_noise: float = math.inf
    noise: Noise | None = None
    found: list[Candidate] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def compile(
        self, name: str, strategy: Strategy, assignment: Mapping[str, str] | None = None
    ) -> Probe:
        """Compiles a strategy and remembers it."""
        with self.progress(name):
            traced = self._traced(strategy)
            # The plain step is planned from: it is compiled as if it fitted, which compilers for
            # TPUs refuse.
            xla_remat = not strategy.is_plain or self.target.platform == "tpu"
            key = fingerprint(traced, self.target), self.groups, xla_remat
            if key not in _remembered:
                result = probe(traced, self.target, None, self.groups, xla_remat=xla_remat)
                _remembered[key] = result
                if len(_remembered) > _MOST:
                    del _remembered[next(iter(_remembered))]
        self.found.append(Candidate(name, strategy, _remembered[key], assignment))
        return _remembered[key]

    def declared(self, strategy: Strategy) -> Mapping[str, int]:
        """Bytes that a step intends to save, by group."""
        return declared_bytes(self._traced(strategy), self.groups)

    def _traced(self, strategy: Strategy) -> TracedStep:
        return trace_scoped(self.make_step, strategy, self.batch, self.target)[0]

    @property
    def left(self) -> int:
        """How many more may be compiled."""
        return self.compiles - len(self.found)

    def fits(self, result: Probe) -> bool:
        """Whether a compiled step fits the budget."""
        total = result.report.total_bytes
        return bool(result.moments) and total is not None and total <= self.budget

    def noise_of(self, candidate: Candidate) -> float | None:
        """The estimated noise of a strategy's gradient over SGD's; None if it was not measured."""
        if self.noise is None:
            return None
        if candidate.assignment is not None:
            return math.sqrt(self.noise.total(candidate.assignment))
        return math.sqrt(self.noise.everywhere(candidate.name))

    def is_quiet(self, candidate: Candidate) -> bool:
        """Whether the noise of a strategy is within its limit."""
        return (self.noise_of(candidate) or 0.0) <= self.most_noise

    def best(self) -> Candidate | None:
        """The fastest that fits; of equally fast ones the exact one, which comes first."""
        fitting = [
            c
            for c in self.found
            if self.fits(c.result)
            and (c.assignment is not None or self.admits(c.strategy))
            and self.is_quiet(c)
        ]
        return min(fitting, key=lambda c: c.result.seconds) if fitting else None
