"""The command `jaxcomp`."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from jaxcomp import memory, planning
from jaxcomp.models import steps
from jaxcomp.planning import MakeStep

app = typer.Typer(help="Training with compressed activations in JAX.", add_completion=False)
ROWS_OF_ANY_MODEL = ("plain", "remat", "remat:dots")
ROWS = ("plain", "remat", "remat:dots", "accumulate:4", "quantize:bits=4", "quantize:bits=2")


@app.callback()
def _commands() -> None:
    """Training with compressed activations in JAX."""


@app.command("memory")
def memory_command(
    model: Annotated[
        str,
        typer.Argument(
            help="resnet50, resmlp_s24, ..., or MODULE:FUNCTION, your own step factory."
        ),
    ],
    rows: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ROW]...",
            help="plain, remat, remat:dots, offload, accumulate:N, transformer:bits=4 "
            "(any model), or a codec such as quantize:bits=2. "
            f"Default: {' '.join(ROWS)}; of your own factory "
            f"{' '.join(ROWS_OF_ANY_MODEL)}.",
        ),
    ] = None,
    batch: int = 128,
    image: Annotated[int, typer.Option(help="Height and width of the images.")] = 224,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="Of the computation.")
    ] = "bfloat16",
    target: Annotated[
        str | None,
        typer.Option(help="cpu, h100, rtx3090, v5e, ...; default: the attached device."),
    ] = None,
    capacity: Annotated[
        float | None, typer.Option(help="GiB that the program may use; default: the target's.")
    ] = None,
    xla_remat: Annotated[
        bool, typer.Option(help="Whether XLA may recompute on its own where memory is short.")
    ] = True,
    max_batch: Annotated[
        bool, typer.Option("--max-batch", help="Look for the largest batch that fits, too.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write the figures here.")] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with the rows' timelines here.")
    ] = None,
) -> None:
    """What XLA keeps of a whole training step, by several strategies, on a device here or not."""
    rows = rows or list(ROWS if ":" not in model else ROWS_OF_ANY_MODEL)
    try:
        for file in (json, html):
            _check_writable(file)
        make_step = _make_step(model, image, dtype)
        table = planning.compare(
            make_step,
            rows,
            batch=batch,
            target=target,
            capacity=_bytes(capacity),
            xla_remat=xla_remat,
            largest_batch=max_batch,
            timelines=html is not None,
            progress=_progress,
        )
        print(table)
        if json is not None:
            json.write_text(table.to_json() + "\n")
        if html is not None:
            timelines = {row.name: row.timeline for row in table.rows if row.timeline}
            memory.draw_html(html, timelines)
    except (ValueError, ImportError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    if not any(row.report for row in table.rows):
        raise typer.Exit(1)


def _make_step(model: str, image: int, dtype: str) -> MakeStep:
    """The step factory of a model of ours, or the user's own."""
    module, colon, function = model.partition(":")
    if not colon:
        return steps.classifier(model, image, dtype)
    if module.endswith(".py"):
        raise ValueError(f"model={model!r}: expected a module's name, without .py")
    sys.path.insert(0, "")
    factory = getattr(importlib.import_module(module), function, None)
    if not callable(factory):
        raise ValueError(f"model={model!r}: {module} has no function {function!r}")
    return factory


def _bytes(gibibytes: float | None) -> int | None:
    if gibibytes is None:
        return None
    if not 0 < gibibytes < 2**20:
        raise ValueError(f"--capacity={gibibytes}: expected GiB")
    return round(gibibytes * 2**30)


def _check_writable(file: Path | None) -> None:
    if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
        raise ValueError(f"{file}: expected a file in a folder that is there")


@contextlib.contextmanager
def _progress(name: str) -> Iterator[None]:
    with Console(stderr=True).status(f"compiling {name}"):
        yield
