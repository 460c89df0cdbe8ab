"""What `fit` returns: a compiled strategy that fits a budget, and the others that were compiled."""

import collections
import dataclasses
import html
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxcomp._core import table
from jaxcomp.memory._analyze import analyze_step
from jaxcomp.memory._live_bytes import format_bytes
from jaxcomp.memory._report import MemoryReport
from jaxcomp.memory._targets import resolve
from jaxcomp.planning._compiled import Compiled
from jaxcomp.planning._groups import Groups, bits_of
from jaxcomp.planning._probe import declared_bytes, trace_scoped
from jaxcomp.planning._provenance import provenance
from jaxcomp.planning._strategies import Strategy
from jaxcomp.planning._watched import MakeStep
from jaxcomp.policies._policy import Policy
from jaxcomp.transform._plan import without_indices

_VERSION = 2
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("target", "name", "spec", "binding", "verdict"), (str,)),
    **dict.fromkeys(("batch", "micro_batches"), (int,)),
    **dict.fromkeys(("budget_bytes", "allowance_bytes", "total_bytes"), (int,)),
    **dict.fromkeys(("parts", "frontier", "errors", "notes"), (list,)),
    "milliseconds": (float, int),
    "noise": (float, int, type(None)),
    "policy": (str, type(None)),
    "made": (dict,),
}
"""The kinds of fields in JSON."""


@dataclasses.dataclass(frozen=True)
class Part:
    """What a plan does with a group of modules.

    Attributes:
        group: The path of the group, "" for what no module computes.
        action: "keep", "recompute", "bits=N", the same with ":products=keep" (what a
            product of an attention reads is kept, not computed again), or one that moves what is
            saved to the host, "offload" or "offload:bits=N"; "remat" or "remat:weights" of the
            blocks of such a strategy; for a strategy of all values alike its name.
        saved_bytes: Estimated bytes that wait for the backward pass.
        milliseconds: Its estimated part of the step time.
        noise: Standard deviation that it adds to the gradient, as a part of that of SGD; None if it
            was not measured.
    """

    group: str
    action: str
    saved_bytes: int
    milliseconds: float
    noise: float | None = None


@dataclasses.dataclass(frozen=True, repr=False)
class FittedPlan:
    """A strategy that fits a budget of memory, as compiled; prints as a table.

    Attributes:
        target: The target's name.
        batch: The batch size.
        budget_bytes: The budget.
        name: The name of the chosen one among `frontier`.
        policy: What `compress` and `checkpoint` take; None if another strategy is chosen.
        spec: The spec of a strategy that is no policy, such as "plain" or "remat:14"; "" for a
            policy.
        micro_batches: The number of parts that the batch is split into.
        total_bytes: What XLA needs on the target, arguments included.
        milliseconds: The estimated step time.
        parts: What is done with each group of modules.
        frontier: All strategies that were compiled, the fastest first.
        binding: The moment at which memory is highest.
        noise: Standard deviation that codes add to the gradient, as a part of that of SGD; the sum
            of what was measured for the groups. None if it was not measured.
        errors: The error of the estimated bytes of each plan that was compiled, as a fraction.
        notes: Remarks.
        allowance_bytes: What of the budget is left for all but XLA's buffers.
        verdict: Why it is chosen.
        made: The date, the command and the versions of packages that made the plan.
    """

    target: str
    batch: int
    budget_bytes: int
    name: str
    policy: Policy | None
    spec: str
    micro_batches: int
    total_bytes: int
    milliseconds: float
    parts: tuple[Part, ...]
    frontier: tuple[Compiled, ...]
    binding: str
    noise: float | None = None
    errors: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()
    allowance_bytes: int = 0
    verdict: str = ""
    made: dict[str, str] = dataclasses.field(default_factory=provenance)

    @property
    def strategy(self) -> Strategy:
        """The strategy, as a step factory takes it."""
        if self.policy is None:
            return Strategy.parse(self.spec)
        return dataclasses.replace(Strategy.of(self.policy), micro_batches=self.micro_batches)

    def __str__(self) -> str:
        """Returns tables of the groups, repeated blocks in one row, and of what was compiled."""
        return self.text()

    def text(self, file: str | Path | None = None) -> str:
        """Returns what `print` shows, for a plan that was saved to a file."""
        lines = [
            f"{self.name}: JAX {self.made.get('jax', '')} lays the step out in "
            f"{format_bytes(self.total_bytes)} of {format_bytes(self.budget_bytes)} on "
            f"{self.target}, batch {self.batch}"
        ]
        if self.parts:
            lines += ["", *table.lines(_rows(self.parts), right=(2, 3, 4, 5))]
        rows = [("compiled", "bytes", "estimate", "measured", "noise", "fits")]
        rows += [
            (
                c.name,
                format_bytes(c.total_bytes),
                f"{c.milliseconds:.2f} ms",
                "" if c.measured_milliseconds is None else f"{c.measured_milliseconds:.2f} ms",
                "" if c.noise is None else f"{c.noise:.3f}",
                "yes" * c.fits,
            )
            for c in self.frontier
        ]
        lines += ["", *table.lines(rows, right=(1, 2, 3, 4)), self.binding, *self._steps()]
        if self.noise is not None:
            lines.append(f"estimated noise of the gradient: {self.noise:.3f} of SGD's")
        lines += [*self.notes, "", *([self.verdict] if self.verdict else []), *self.usage(file)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Returns what notebooks show."""
        return f"<pre>{html.escape(str(self))}</pre>"

    def __repr__(self) -> str:
        """Returns one line."""
        return (
            f"FittedPlan({self.name!r}: {format_bytes(self.total_bytes)} of "
            f"{format_bytes(self.budget_bytes)} on {self.target}, batch {self.batch}, "
            f"{len(self.frontier)} compiled)"
        )

    def usage(self, file: str | Path | None = None) -> list[str]:
        r"""Returns lines that say how to apply the plan.

        Args:
            file: Where the plan was saved; without it the lines assume the object `plan`.

        Example:
            >>> def usage(spec, micro_batches):
            ...     figures = (48, "plan 1", None, spec, micro_batches, 32, 1.0, (), (), "")
            ...     return FittedPlan("cpu", 8, *figures).usage()
            >>> print(*usage("remat:14", 1), sep="\n")
            Apply it:
                strategy = jc.planning.Strategy.parse('remat:14')
                model = strategy(model)
            >>> usage("plain", 1)
            []
        """
        lines = []
        if self.policy is not None and file is None:
            lines.append("model = plan.strategy(model)")
        elif self.policy is not None:
            lines.append(f"plan = jc.planning.FittedPlan.load({str(file)!r})")
            lines.append("model = plan.strategy(model)")
        elif not self.strategy.is_plain and self.spec != f"accumulate:{self.micro_batches}":
            lines.append(f"strategy = jc.planning.Strategy.parse({self.spec!r})")
            lines.append("model = strategy(model)")
        if self.micro_batches > 1:
            lines.append(f"# split the batch of the step into {self.micro_batches} parts")
        return ["Apply it:", *(f"    {line}" for line in lines)] if lines else []

    def _steps(self) -> list[str]:
        """Returns the next faster and the next smaller one of what was compiled."""
        own, spent = self.total_bytes, self.milliseconds
        faster = [c for c in self.frontier if c.total_bytes > own and c.milliseconds < spent]
        smaller = [c for c in self.frontier if c.total_bytes < own and c.milliseconds > spent]
        found: list[str] = []
        if faster:
            up = min(faster, key=lambda c: c.total_bytes)
            more, less = up.total_bytes - own, spent - up.milliseconds
            found.append(f"faster: {up.name}, {format_bytes(more)} more, {less:.2f} ms less")
        if smaller:
            down = min(smaller, key=lambda c: c.milliseconds)
            saved, longer = own - down.total_bytes, down.milliseconds - spent
            found.append(f"smaller: {down.name}, {format_bytes(saved)} less, {longer:.2f} ms more")
        return found

    def to_json(self) -> str:
        """Returns the plan as JSON text, which `from_json` reads."""
        fields = dataclasses.asdict(self)
        fields["policy"] = self.policy and json.loads(self.policy.to_json())
        first = {"version": _VERSION, "made": fields.pop("made")}
        return json.dumps(first | fields, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "FittedPlan":
        """Reads what `to_json` wrote.

        Raises:
            ValueError: If `text` is not such JSON.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            version = fields.pop("version")
            if version == 1:
                fields["made"] = {"jax": fields.pop("compiler").removeprefix("JAX ")}
            elif version == _VERSION:
                fields["policy"] = fields["policy"] and json.dumps(fields["policy"])
            else:
                raise ValueError(f"version {version!r}, expected {_VERSION} or 1")
            for name, kinds in _KINDS.items():
                if name in fields and not isinstance(fields[name], kinds):
                    raise ValueError(f"{name} is of type {type(fields[name]).__name__}")
            fields["policy"] = fields["policy"] and Policy.from_json(fields["policy"])
            fields["parts"] = tuple(Part(**part) for part in fields["parts"])
            fields["frontier"] = tuple(Compiled(**point) for point in fields["frontier"])
            fields["errors"], fields["notes"] = tuple(fields["errors"]), tuple(fields["notes"])
            return cls(**fields)
        except Exception as error:  # of what a file may hold
            raise ValueError(f"text: expected JSON of FittedPlan.to_json: {error!r}") from error

    def save(self, file: str | Path) -> None:
        """Writes the plan to a JSON file."""
        Path(file).write_text(self.to_json() + "\n")

    @classmethod
    def load(cls, file: str | Path) -> "FittedPlan":
        """Reads a plan from a JSON file.

        Raises:
            OSError: If the file cannot be read.
            ValueError: If it holds no plan.
        """
        return cls.from_json(Path(file).read_text())

    def draw(self, file: str | Path) -> None:
        """Draws the bytes and the estimated time of all that was compiled.

        Args:
            file: The picture; its suffix is the format, such as ".png".

        Raises:
            ImportError: If matplotlib is not installed.
        """
        try:
            from jaxcomp.planning import _frontier
        except ImportError as error:
            raise ImportError(f"{error}; install it with: pip install 'jaxcomp[plot]'") from error
        title = f"Training step on {self.target}, batch {self.batch}, as compiled"
        _frontier.draw(file, title, self.frontier, self.name, self.budget_bytes)

    def verify(
        self, make_step: MakeStep, *, batch: int | None = None, target: str | None = None
    ) -> MemoryReport:
        """Compiles the step by this plan again, for this or another batch or target.

        Args:
            make_step: The step factory, as `compare` takes it.
            batch: The batch size; by default, the plan's.
            target: The target; by default, the plan's.

        Returns:
            The report of the compiled step.

        Raises:
            ValueError: If the model has other groups of modules than the plan, which are named, or
                the batch does not divide.
        """
        where = resolve(target or self.target)
        size = self.batch if batch is None else batch
        self.strategy.check_batch(size)
        traced, models = trace_scoped(make_step, self.strategy, size, where)
        plain, _ = trace_scoped(make_step, Strategy.parse("plain"), size, where)
        groups = Groups.of(models, plain)
        known = {part.group for part in self.parts}
        there = {groups.group_of(path) for path in groups.paths}
        gone = sorted(known - there - {""})
        new = sorted(set(declared_bytes(traced, groups)) - known - {""})
        if gone or new:
            raise ValueError(
                f"make_step: expected the model of the plan; groups that are gone: "
                f"{', '.join(gone) or 'none'}; new: {', '.join(new) or 'none'}"
            )
        return analyze_step(traced, where, None, xla_remat=True).report


def _rows(parts: Sequence[Part]) -> list[tuple[str, ...]]:
    alike: dict[tuple[str, str], list[Part]] = collections.defaultdict(list)
    for part in parts:
        alike[without_indices(part.group), part.action].append(part)
    rows: list[tuple[str, ...]] = [("modules", "action", "number", "saved", "estimate", "noise")]
    rows += [
        (
            group or "(no module)",
            action,
            str(len(those)),
            format_bytes(sum(part.saved_bytes for part in those)),
            f"{sum(part.milliseconds for part in those):.2f} ms",
            _noise(those),
        )
        for (group, action), those in sorted(alike.items())
    ]
    return rows


def _noise(parts: Sequence[Part]) -> str:
    """Returns the noise of independent parts together."""
    if any(part.noise is None for part in parts):
        return "not known" if any(bits_of(part.action) for part in parts) else ""
    return f"{math.hypot(*(part.noise or 0.0 for part in parts)):.3f}"
