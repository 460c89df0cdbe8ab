"""`jaxcomp memory`: one training step by several strategies."""

import sys
import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from jaxcomp import memory as analysis
from jaxcomp import planning
from jaxcomp.cli import _named as named
from jaxcomp.cli import _options as options
from jaxcomp.cli._errors import told
from jaxcomp.cli._progress import Compilations
from jaxcomp.memory._live_bytes import format_bytes
from jaxcomp.memory._report import known

ROWS = ("plain", "remat", "remat:dots", "accumulate:4", "quantize:bits=4", "quantize:bits=2")
ROWS_OF_ANY_MODEL = ("plain", "remat", "remat:dots", "quantize:bits=4")


def memory(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help=f"{options.MODEL} With --args it is the step itself: your own jitted function.",
        ),
    ],
    rows: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ROW",
            help="A strategy: plain, open, remat, remat:dots, remat:weights, remat:N, offload, "
            "accumulate:N or accumulate:N:SPEC; or the spec of a policy, such as fused:bits=4, "
            "transformer:bits=4 or quantize:bits=2, which means jc.compress(model, spec). "
            f"Default: {' '.join(ROWS)}; for your own step {' '.join(ROWS_OF_ANY_MODEL)}.",
        ),
    ] = None,
    args: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME",
            help="A function that returns the arguments of your step, or a tuple of them, such as "
            "train:make_args. No step factory is needed then.",
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Examples in a batch. Default: 128, or as --args has it.")
    ] = None,
    image: options.Image = None,
    dtype: options.Dtype = None,
    target: options.Target = None,
    fsdp: options.Fsdp = False,
    capacity: Annotated[
        str | None,
        typer.Option(
            help="Memory that the step may use, such as 11GiB. Default: that of the target."
        ),
    ] = None,
    allowance: options.Allowance = None,
    no_xla_remat: Annotated[
        bool,
        typer.Option(
            "--no-xla-remat", help="XLA may not recompute values itself where memory is short."
        ),
    ] = False,
    max_batch: Annotated[
        bool, typer.Option("--max-batch", help="Also find the largest batch that fits.")
    ] = False,
    wide: Annotated[
        bool, typer.Option("--wide", help="Show all columns, as where the output is piped.")
    ] = False,
    csv: Annotated[
        Path | None, typer.Option(help="Write the figures to this CSV file after each row.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write the figures to this JSON file after each row.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write a page with the rows' timelines to this file after each row."),
    ] = None,
    open_page: Annotated[
        bool, typer.Option("--open", help="Open the page of --html in a browser at the end.")
    ] = False,
    no_cache: options.NoCache = False,
    traceback: options.Traceback = False,
    list_models: options.ListModels = False,
    list_targets: options.ListTargets = False,
) -> None:
    """Compare the memory of a training step by several strategies.

    Each row is compiled ahead of time and shown when it is done. Nothing is run.

    The table follows at the end. After Ctrl-C it has the rows that are done.
    """
    rows = rows or list(ROWS if ":" not in model else ROWS_OF_ANY_MODEL)
    tables: list[planning.Comparison] = []
    progress = Compilations(len(rows))
    interrupted = threading.Event()

    def save(table: planning.Comparison) -> None:
        tables.append(table)
        progress.print(_line(table.rows[-1]))
        if json is not None:
            json.write_text(table.to_json() + "\n")
        if csv is not None:
            csv.write_text(table.to_csv())
        timelines = {row.name: row.timeline for row in table.rows if row.timeline}
        if html is not None and timelines:
            size = "" if table.rows[0].batch is None else f", batch {table.rows[0].batch}"
            _draw(html, timelines, table, f"{model}{size}, for {table.target}")
        if interrupted.is_set():
            raise KeyboardInterrupt

    with told(interrupted, whole=traceback):
        for file in (csv, json, html):
            options.check_writable(file)
        if open_page and html is None:
            raise ValueError("--open: expected --html FILE, which it opens")
        if target is not None:
            options.use_the_cpu()
        if no_cache:
            options.turn_off_the_cache()
        if args is None:
            step, arguments = options.make_step(model, image, dtype, target, fsdp), []
            batch = 128 if batch is None else batch
        else:
            options.check_not_given(
                "a step factory or a model by name, and no --args",
                **{"batch": batch, "image": image, "dtype": dtype, "fsdp": fsdp},
                max_batch=max_batch,
            )
            step, arguments = named.function(model), [named.arguments(args)]
        planning.compare(
            step,
            *arguments,
            rows,
            batch=batch,
            target=target,
            capacity=capacity,
            allowance=allowance,
            xla_remat=not no_xla_remat,
            largest_batch=max_batch,
            timelines=html is not None,
            progress=progress,
            save=save,
        )
    for table in tables[-1:]:
        _show(table, wide)
    if interrupted.is_set():
        raise typer.Exit(130)
    if open_page and html is not None and html.exists():
        typer.launch(str(html))
    errors = [row.exception for row in tables[-1].rows if row.exception is not None]
    if traceback and errors:
        raise errors[0]
    if not any(row.report for row in tables[-1].rows):
        raise typer.Exit(1)


def _draw(
    file: Path, timelines: dict[str, analysis.Timeline], table: planning.Comparison, title: str
) -> None:
    """Writes the page, with what each row needs and how it was made."""
    names = ("jaxcomp", "jax", "date")
    made = ", ".join(f"{name} {table.made[name]}" for name in names)
    usable = table.usable_bytes
    details = {}
    for row in table.rows:
        if row.report and row.report.total_bytes is not None:
            details[row.name] = f"{format_bytes(row.report.total_bytes)} needed"
            if usable is not None:
                fits = row.report.total_bytes + table.allowance_bytes <= usable
                details[row.name] += f" of {format_bytes(usable)}: "
                details[row.name] += "fits" if fits else "does not fit"
    analysis.draw_html(
        file, timelines, limit=usable, title=title, subtitle=f"Compiled: {made}", details=details
    )


def _show(table: planning.Comparison, wide: bool) -> None:
    if wide or not sys.stdout.isatty():
        print(table)
    else:
        Console().print(table)


def _line(row: planning.Row) -> str:
    """Returns the main figures of a row."""
    report = row.report
    if report is None:
        return f"{row.name}: failed: {row.error}"
    total = known(report.total_bytes, format_bytes)
    traffic = known(report.hbm_traffic_bytes, format_bytes)
    return f"{row.name}: {total} in total, {traffic} of HBM traffic"
