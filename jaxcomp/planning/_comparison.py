"""`compare`: one training step by several strategies, in one table."""

import csv
import dataclasses
import io
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxcomp.memory._analyze import analyze_step, usable_bytes
from jaxcomp.memory._batch import max_batch
from jaxcomp.memory._compiling import CompileError
from jaxcomp.memory._live_bytes import Timeline, format_bytes
from jaxcomp.memory._options import removed_barriers
from jaxcomp.memory._report import MemoryReport, format_seconds, known
from jaxcomp.memory._targets import resolve
from jaxcomp.planning._fit import allowance_of
from jaxcomp.planning._own_step import factory_of
from jaxcomp.planning._provenance import provenance
from jaxcomp.planning._strategies import Strategy
from jaxcomp.planning._users_frames import place
from jaxcomp.planning._verdict import ERROR, TRAFFIC_ERROR, Option, Room, choose, explain
from jaxcomp.planning._watched import MakeStep, trace_step

_NOT_GIVEN = "not given"
HEADER = (
    "row",
    "declared",
    "temp",
    "peak",
    "total",
    "total / plain",
    "HBM traffic",
    "traffic / plain",
    "estimated time",
    "time / plain",
    "compile s",
    "largest batch",
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One strategy of making the step.

    Attributes:
        name: the strategy's spec.
        batch: the batch size; None if no step factory was given.
        report: what the compiler made of it; None if it failed.
        max_batch: the largest batch that fits; None if it was not asked for.
        timeline: which buffers are alive when; None if it was not asked for.
        error: what the compiler or the step factory failed with, or None.
        undisturbed: of the plain step, the report without XLA's own recomputation; None if XLA
            recomputes nothing. The table's ratios are to this report.
        exception: the exception of `error`, with its traceback.
        strategy: the strategy; None stands for that of the name.
    """

    name: str
    batch: int | None
    report: MemoryReport | None
    max_batch: int | None = None
    timeline: Timeline | None = None
    error: str | None = None
    undisturbed: MemoryReport | None = None
    exception: Exception | None = dataclasses.field(default=None, compare=False)
    strategy: Strategy | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the row's figures by name.

        They are `row`, `batch`, those of the report, `max_batch` and `error`, and as `undisturbed`
        those of that report.
        """
        report = {} if self.report is None else self.report.to_dict()
        own = {"row": self.name, "batch": self.batch}
        more = {} if self.undisturbed is None else {"undisturbed": self.undisturbed.to_dict()}
        return own | report | {"max_batch": self.max_batch, "error": self.error} | more


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The rows of a table; prints as Markdown, with a last line that says which row to use.

    On a terminal, `rich.print` shows five columns.

    Attributes:
        target: the target's name.
        usable_bytes: what a step may use of its memory.
        rows: in the order asked for.
        allowance_bytes: what of it is left for all but XLA's buffers.
        notes: remarks on all rows.
        made: the date, the command and the versions of packages that made the table.
    """

    target: str
    usable_bytes: int | None
    rows: tuple[Row, ...]
    allowance_bytes: int = 0
    made: dict[str, str] = dataclasses.field(default_factory=provenance)
    notes: tuple[str, ...] = ()

    def answer(self) -> Row | None:
        """Returns the row to use, as the last line says; None if none is known to fit."""
        options, _, error = self._costs()
        chosen = choose(options, self._room, error)
        return next((row for row in self.rows if chosen and row.name == chosen.name), None)

    def verdict(self) -> str:
        """Returns which row to use, and why."""
        options, figure, error = self._costs()
        return explain(options, self._room, error, figure)

    @property
    def _room(self) -> Room:
        return Room(self.usable_bytes, self.allowance_bytes, self.target)

    def _figure(self) -> str:
        """Returns the figure by which rows are compared: the time, if it is known."""
        reports = [row.report for row in self.rows if row.report]
        timed = any(report.estimated_seconds is not None for report in reports)
        return "estimated_seconds" if timed else "hbm_traffic_bytes"

    def _costs(self) -> tuple[list[Option], str, float]:
        """Returns the compiled rows, by estimated time or by HBM traffic, and the error of that."""
        figure = self._figure()
        timed = figure == "estimated_seconds"
        options = []
        for row in self.rows:
            if row.report and row.report.total_bytes is not None:
                strategy = row.strategy or Strategy.parse(row.name)
                unchanged = strategy.is_unchanged and not row.report.xla_recomputes
                total, cost = row.report.total_bytes, getattr(row.report, figure)
                options.append(Option(row.name, total, cost, strategy.is_exact, unchanged))
        return options, "time" if timed else "HBM traffic", ERROR if timed else TRAFFIC_ERROR

    def to_dict(self) -> dict[str, Any]:
        """Returns how the table was made, the target, the verdict and the rows, by name."""
        return {
            "made": self.made,
            "target": self.target,
            "usable_bytes": self.usable_bytes,
            "allowance_bytes": self.allowance_bytes,
            "verdict": self.verdict(),
            "rows": [row.to_dict() for row in self.rows],
        }

    def to_csv(self) -> str:
        """Returns the figures as CSV, a line for each row."""
        rows = [row.to_dict() | {"undisturbed": None} for row in self.rows]
        names = list(dict.fromkeys(name for row in rows for name in row if name != "undisturbed"))
        text = io.StringIO()
        writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    def to_json(self) -> str:
        """Returns `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        """Returns a Markdown table with human units."""
        _, base = self._plain()
        table = [HEADER, *(_cells(row, base) for row in self.rows)]
        widths = [max(len(cells[i]) for cells in table) for i in range(len(HEADER))]
        table.insert(1, tuple("-" * width for width in widths))
        lines = [
            "| " + " | ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)) + " |"
            for cells in table
        ]
        return "\n".join([*lines, "", *self._notes(), self.verdict()])

    def __rich__(self) -> Group:
        """Returns a table of five columns for a terminal."""
        _, base = self._plain()
        answer = self.answer()
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("row", overflow="fold")
        figure = self._figure()
        cost = "time / plain" if figure == "estimated_seconds" else "traffic / plain"
        for name in ("needs", "/ plain", cost, "fits"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in self.rows:
            style = "bold" if answer is not None and row.name == answer.name else None
            table.add_row(*map(Text, _five_cells(row, base, self._room, figure)), style=style)
        texts = [Text(line) for line in [*self._notes(), self.verdict()]]
        return Group(table, *texts)

    def _plain(self) -> tuple[Row | None, MemoryReport | None]:
        """Returns the plain row, and the report that ratios are to."""
        plain = next((row for row in self.rows if row.name == "plain"), None)
        return plain, None if plain is None else plain.undisturbed or plain.report

    def _notes(self) -> list[str]:
        """Returns lines on copies to the host, flags, XLA's recomputation and failed rows."""
        plain, _ = self._plain()
        on_host = [
            f"{row.name}: {format_bytes(row.report.host_temp_bytes)} in the host's memory"
            for row in self.rows
            if row.report and row.report.host_temp_bytes
        ]
        names: dict[str, list[str]] = {}
        for row in self.rows:
            if row.report and row.report.xla_flag:
                names.setdefault(row.report.xla_flag, []).append(row.name)
        flags = [f"{', '.join(of)}: compiled with {flag}" for flag, of in names.items()]
        failed = [f"{row.name} failed: {row.error}{_place(row)}" for row in self.rows if row.error]
        return [*on_host, *flags, *self._recomputed(plain), *failed, *self.notes]

    def _repr_markdown_(self) -> str:
        """Returns what notebooks show."""
        return str(self)

    def _recomputed(self, plain: Row | None) -> list[str]:
        """Returns a line that names the rows marked with `*`, if any."""
        if not any(row.report and row.report.xla_recomputes for row in self.rows):
            return []
        line = "* XLA recomputes values of this step on its own, because it would not fit"
        if plain is not None and plain.undisturbed is not None:
            total = _mebibytes(plain.undisturbed.total_bytes)
            line += f"; ratios are to the plain step without that, {total}"
        return [line]


def compare(
    make_step: MakeStep | Callable[..., Any],
    *given: Any,
    batch: int | None = None,
    target: str | None = None,
    capacity: int | str | None = None,
    allowance: int | str | None = None,
    xla_remat: bool = True,
    largest_batch: bool = False,
    timelines: bool = False,
    progress: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    save: Callable[[Comparison], Any] | None = None,
) -> Comparison:
    """Compiles a training step by several strategies and tabulates its memory.

    Nothing is run. The device may be absent: XLA compiles the step for it ahead of time.

    There are two forms. `compare(make_step, rows, batch=128)` takes a step factory.
    `compare(step, arguments, rows)` takes a step and its arguments, as `analyze(step, *arguments)`
    does: the strategies are applied to copies of the Flax NNX models among the arguments, and to
    the `apply_fn` of a Linen `TrainState`. Micro-batches and other batch sizes need a factory, and
    so do recomputed blocks of functions.

    Args:
        make_step: your own step factory. `make_step(transform, batch)` builds a Flax NNX model,
            applies `transform(model)` to it, which returns the same model, splits the batch into
            `transform.micro_batches` parts, and returns the step and its arguments, as
            `analyze(step, *arguments)` takes them; `nnx.eval_shape` makes the model for free.
            For Linen, Equinox and functions it calls `transform(fn)` of the forward pass, such as
            `model.apply`, in place of the model, and applies `jax.checkpoint` to its blocks where
            `transform.remat` is true, with the policy `transform.remat_policy`.
        *given: `rows`, or `arguments` and `rows`. Rows are strategies, their specs
            (`Strategy.parse`), policies or codecs. With "plain" among them the table has ratios to
            it.
        batch: the batch size that a step factory is called with.
        target: as in `analyze`.
        capacity: what the program may use, as in `analyze`: bytes, or text such as "11GiB".
        allowance: what of that is left for all but XLA's buffers, such as workspaces of libraries:
            bytes or text. By default 96 MiB of a GPU, the most that was measured, and nothing
            elsewhere.
        xla_remat: as in `analyze`. Rows in which XLA recomputes values on its own are marked, and
            the plain step is compiled without that, too, for the ratios.
        largest_batch: whether each row's largest batch that fits is looked for too, by further
            compilations (`max_batch`).
        timelines: whether each row has its timeline, too.
        progress: is entered with a row's name while the row is compiled.
        save: is called with the table so far after each row, which may take minutes.

    Returns:
        The table. A row that does not fit the model, that `make_step` does not apply, or whose
        compilation fails has an error in place of a report.

    Raises:
        TypeError: if neither a step factory and a batch size are given, nor a step and arguments.
        ValueError: if a row is unknown or is there twice, or the batch does not divide into its
            micro-batches, or the target or its capacity is not what it should be.
        ImportError: if the wheel with the target's compiler is not installed.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> def make_step(transform, batch):
        ...     def block():
        ...         return nnx.Sequential(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), jnp.sin)
        ...     model = transform(nnx.eval_shape(lambda: nnx.Sequential(block(), block())))
        ...     gradient = nnx.grad(lambda model, x: model(x).sum())
        ...     return gradient, (model, jax.ShapeDtypeStruct((batch, 64), jnp.float32))
        >>> table = compare(make_step, ["plain", "remat"], batch=256, target="cpu")
        >>> [row.report.declared_residual_bytes for row in table.rows]
        [196608, 65536]
    """
    make_step, rows, size = _read(make_step, given, batch, largest_batch)
    if isinstance(rows, str) or not isinstance(rows, Sequence) or not rows:
        raise ValueError(f"rows={rows!r}: expected a list of at least one")
    strategies = [Strategy.of(row) for row in rows]
    if len({strategy.spec for strategy in strategies}) < len(strategies):
        raise ValueError(f"rows={rows!r}: expected each once")
    for strategy in strategies if batch is not None else ():
        strategy.check_batch(size)
    where = resolve(target)
    usable = usable_bytes(where, capacity)
    kept_free = allowance_of(allowance, where)
    if largest_batch and usable is None:
        raise ValueError(f"target={where.name!r}: its memory is not known; give a capacity")

    def row(strategy: Strategy) -> Row:
        traced, _ = trace_step(make_step, strategy, size, where)
        if where.platform == "cpu" and (note := removed_barriers(traced.compiler_options)):
            notes[note] = None
        report, timeline, _ = analyze_step(traced, where, capacity, xla_remat, timelines)
        largest = None
        if largest_batch and usable is not None:
            make = partial(make_step, strategy)
            largest = max_batch(
                make,
                target,
                multiple=strategy.micro_batches,
                capacity=usable - kept_free,
                xla_remat=xla_remat,
            )
        undisturbed = None
        if strategy.is_plain and report.xla_recomputes:
            undisturbed = analyze_step(traced, where, capacity, xla_remat=False).report
        return Row(
            *(strategy.spec, batch, report, largest, timeline, None, undisturbed, None),
            strategy,
        )

    def table() -> Comparison:
        rows = tuple(_without_copies(strategies, done))
        return Comparison(where.name, usable, rows, kept_free, made, tuple(notes))

    made = provenance()
    notes: dict[str, None] = {}  # in order, each once
    done: list[Row] = []
    for strategy in strategies:
        with progress(strategy.spec):
            try:
                done.append(row(strategy))
            except Exception as error:  # of the user's code, too: the other rows are of use
                failed = Row(strategy.spec, batch, None, error=_text(error), exception=error)
                done.append(dataclasses.replace(failed, strategy=strategy))
        if save is not None:
            save(table())
    return table()


def _read(
    step: Any, given: tuple[Any, ...], batch: int | None, largest_batch: bool
) -> tuple[MakeStep, Any, int]:
    """Returns a step factory, the rows and the batch size of either form of a call."""
    if len(given) == 1 and batch is not None:
        return step, given[0], batch
    if len(given) != 2 or batch is not None or not isinstance(given[0], tuple | list):
        raise TypeError(
            "expected compare(make_step, rows, batch=...) with a step factory, or compare(step, "
            "arguments, rows) with a tuple of the step's arguments"
        )
    if largest_batch:
        raise ValueError("largest_batch=True: expected a step factory, which makes other batches")
    arguments, rows = given
    return factory_of(step, tuple(arguments)), rows, 0


def _text(error: Exception) -> str:
    """Returns the message of an error, after the name of its class where that tells more."""
    kinds = (ValueError, TypeError, CompileError, ImportError)
    text = str(error)
    return text if isinstance(error, kinds) and text else f"{type(error).__name__}: {text}"


def _place(row: Row) -> str:
    where = "" if row.exception is None else place(row.exception)
    return f" ({where})" if where else ""


def _without_copies(strategies: Sequence[Strategy], rows: Sequence[Row]) -> list[Row]:
    """Returns the rows, with an error where one is the plain step under another name."""

    def figures(row: Row) -> tuple[int | None, ...] | None:
        report = row.report
        if report is None:
            return None
        return report.declared_residual_bytes, report.flops, report.temp_bytes

    pairs = list(zip(strategies, rows, strict=False))  # the table may not be complete yet
    plain = [figures(row) for strategy, row in pairs if row.report and strategy.is_plain]

    def error(strategy: Strategy) -> str:
        if strategy.micro_batches == 1 and strategy.remat:
            return (
                "made no difference to the step: of the model's modules in lists none is called "
                "(a method or a layer of it may be), or none saves more than this row would"
            )
        if strategy.micro_batches == 1:
            return "made no difference to the step: leave the row out"
        return (
            "made no difference to the step: make_step is expected to split the batch into "
            "transform.micro_batches parts; if it does, leave the row out"
        )

    return [
        dataclasses.replace(row, report=None, timeline=None, error=error(strategy))
        if row.report and figures(row) in plain and not strategy.is_plain
        else row
        for strategy, row in pairs
    ]


def _cells(row: Row, plain: MemoryReport | None) -> tuple[str, ...]:
    report = row.report
    if report is None:
        return (row.name, "failed", *[""] * (len(HEADER) - 2))
    traffic, total = report.hbm_traffic_bytes, report.total_bytes
    return (
        f"{row.name} *" if report.xla_recomputes else row.name,
        *map(
            _mebibytes,
            (report.declared_residual_bytes, report.temp_bytes, report.peak_bytes, total),
        ),
        _ratio(total, plain, "total_bytes"),
        known(traffic, _mebibytes),
        _ratio(traffic, plain, "hbm_traffic_bytes"),
        _NOT_GIVEN
        if report.estimated_seconds is None
        else format_seconds(report.estimated_seconds),
        _ratio(report.estimated_seconds, plain, "estimated_seconds"),
        _NOT_GIVEN if report.compile_seconds is None else f"{report.compile_seconds:.0f}",
        "" if row.max_batch is None else str(row.max_batch),
    )


def _five_cells(row: Row, plain: MemoryReport | None, room: Room, figure: str) -> tuple[str, ...]:
    report = row.report
    if report is None or report.total_bytes is None:
        return row.name, "failed" if report is None else "", "", "", ""
    fits, cost = room.fits(report.total_bytes), getattr(report, figure)
    free = (room.usable_bytes or 0) - room.allowance_bytes - report.total_bytes
    return (
        f"{row.name} *" if report.xla_recomputes else row.name,
        format_bytes(report.total_bytes),
        "" if plain is None else _ratio(report.total_bytes, plain, "total_bytes"),
        "" if plain is None or cost is None else _ratio(cost, plain, figure),
        "" if fits is None else f"{format_bytes(abs(free))} {'free' if fits else 'short'}",
    )


def _mebibytes(count: int | None) -> str:
    return _NOT_GIVEN if count is None else f"{count / 2**20:,.1f} MiB"


def _ratio(count: float | None, plain: MemoryReport | None, figure: str) -> str:
    if plain is None:
        return "no plain row"
    of = getattr(plain, figure)
    return _NOT_GIVEN if count is None or of is None else f"{count / of:.2f}"
