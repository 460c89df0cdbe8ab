"""The command `jaxcomp`."""

import contextlib
import importlib
import importlib.metadata
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal

import jax
import typer
from rich.console import Console

from jaxcomp import memory, planning
from jaxcomp.memory._gpus import GPUS
from jaxcomp.memory._live_bytes import format_bytes
from jaxcomp.memory._report import known
from jaxcomp.memory._targets import TPUS, resolve
from jaxcomp.models import steps
from jaxcomp.planning import MakeStep
from jaxcomp.planning._fit import ACTIONS, BITS

app = typer.Typer(add_completion=False)
ROWS = ("plain", "remat", "remat:dots", "accumulate:4", "quantize:bits=4", "quantize:bits=2")
ROWS_OF_ANY_MODEL = ("plain", "remat", "remat:dots", "quantize:bits=4")

_TARGETS = ", ".join(["cpu", *(device.name for device in (*GPUS, *TPUS))])

_Model = Annotated[
    str,
    typer.Argument(
        help="A built-in model (resnet50, resmlp_s24, ...), or MODULE:FUNCTION, such as "
        "train:make_step for the function make_step in train.py. It takes (transform, batch) and "
        "returns the training step and its arguments."
    ),
]
_Batch = Annotated[int, typer.Option(help="Examples in a batch.")]
_Image = Annotated[int, typer.Option(help="Height and width of the images, for a model by name.")]
_Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"],
    typer.Option(help="Dtype of the computation, for a model by name."),
]
_Fsdp = Annotated[
    bool,
    typer.Option(
        "--fsdp",
        help="Shard parameters and optimizer over the devices of the target, such as h100:8, for a "
        "model by name. The batch is always split over them.",
    ),
]
_Target = Annotated[
    str | None,
    typer.Option(
        help=f"Device to compile for: {_TARGETS}; or several, such as h100:8 or "
        "v5e:4x4. It need not be attached, but GPUs need the extra gpu-aot, and TPUs tpu-aot. "
        "Default: the attached device."
    ),
]


def _print_version(asked: bool) -> None:
    if asked:
        print(importlib.metadata.version("jaxcomp"))
        raise typer.Exit


@app.callback()
def _commands(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Training with compressed activations in JAX."""


@app.command("memory")
def memory_command(
    model: _Model,
    rows: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ROW",
            help="A strategy: plain, open, remat, remat:dots, remat:weights, remat:N, offload, "
            "accumulate:N or accumulate:N:SPEC; or the spec of a policy, such as fused:bits=4, "
            "transformer:bits=4 or quantize:bits=2, which means jc.compress(model, spec). "
            f"Default: {' '.join(ROWS)}; for your own step factory {' '.join(ROWS_OF_ANY_MODEL)}.",
        ),
    ] = None,
    batch: _Batch = 128,
    image: _Image = 224,
    dtype: _Dtype = "bfloat16",
    target: _Target = None,
    fsdp: _Fsdp = False,
    capacity: Annotated[
        float | None,
        typer.Option(help="Memory that the step may use, in GiB. Default: that of the target."),
    ] = None,
    xla_remat: Annotated[
        bool, typer.Option(help="Whether XLA may recompute values itself if memory is short.")
    ] = True,
    max_batch: Annotated[
        bool, typer.Option("--max-batch", help="Also find the largest batch that fits.")
    ] = False,
    json: Annotated[
        Path | None, typer.Option(help="Write the figures to this file after each row.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write a page with the rows' timelines to this file after each row."),
    ] = None,
) -> None:
    """Compare the memory of a training step by several strategies.

    Each row is compiled ahead of time and shown when it is done. Nothing is run.

    The table follows at the end. After Ctrl-C it has the rows that are done.
    """
    rows = rows or list(ROWS if ":" not in model else ROWS_OF_ANY_MODEL)
    tables: list[planning.Comparison] = []

    def save(table: planning.Comparison) -> None:
        tables.append(table)
        _print_row(table.rows[-1])
        if json is not None:
            json.write_text(table.to_json() + "\n")
        timelines = {row.name: row.timeline for row in table.rows if row.timeline}
        if html is not None and timelines:
            report = table.rows[-1].report
            memory.draw_html(html, timelines, limit=report.usable_bytes if report else None)
        if interrupted.is_set():
            raise KeyboardInterrupt

    interrupted = threading.Event()
    try:
        for file in (json, html):
            _check_writable(file)
        if target is not None:
            _use_the_cpu()
        with _recorded_interrupt(interrupted):
            planning.compare(
                _make_step(model, image, dtype, target, fsdp),
                rows,
                batch=batch,
                target=target,
                capacity=_bytes(capacity),
                xla_remat=xla_remat,
                largest_batch=max_batch,
                timelines=html is not None,
                progress=_progress,
                save=save,
            )
    except KeyboardInterrupt:
        interrupted.set()
    except (ValueError, ImportError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    for table in tables[-1:]:
        print(table)
    if interrupted.is_set():
        raise typer.Exit(130)
    if not any(row.report for row in tables[-1].rows):
        raise typer.Exit(1)


@app.command("fit")
def fit_command(
    model: _Model,
    batch: _Batch = 128,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Memory that the step may need, such as 11GiB. Default: what it may use of the "
            "target's memory, 75% of a GPU's."
        ),
    ] = None,
    image: _Image = 224,
    dtype: _Dtype = "bfloat16",
    target: _Target = None,
    fsdp: _Fsdp = False,
    action: Annotated[
        list[str] | None,
        typer.Option(help=f"What the plan may do; repeatable. Default: {', '.join(ACTIONS)}."),
    ] = None,
    bits: Annotated[
        list[int] | None,
        typer.Option(
            help="8, 4, 3 or 2: bits of an element that the plan may use; repeatable. Default: all."
        ),
    ] = None,
    biased: Annotated[
        bool,
        typer.Option("--biased", help="Also allow 2-bit codes of batch norms, which are biased."),
    ] = False,
    pin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH=CHOICE",
            help="keep, recompute or bits=N for the modules of a path, a regular expression, such "
            "as 'head/.*=keep'; repeatable.",
        ),
    ] = None,
    split_batch_statistics: Annotated[
        bool,
        typer.Option(
            "--split-batch-statistics",
            help="Also allow micro-batches where batch norms then see fewer images.",
        ),
    ] = False,
    compiles: Annotated[int, typer.Option(help="The largest number of compilations.")] = 8,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Run the three fastest steps that fit on the attached target, and choose among "
            "them.",
        ),
    ] = False,
    max_batch: Annotated[
        bool,
        typer.Option("--max-batch", help="Plan for the largest batch that can be made to fit."),
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write the plan to this file.")] = None,
    png: Annotated[
        Path | None, typer.Option(help="Draw what was compiled: bytes against estimated time.")
    ] = None,
) -> None:
    """Find the fastest way to fit a training step into a budget of memory.

    Steps are compiled ahead of time. Nothing is run without --calibrate. After Ctrl-C the best that
    was compiled until then is shown.
    """
    interrupted = threading.Event()
    try:
        for file in (json, png):
            _check_writable(file)
        allowed: dict[str, Any] = {
            "budget": budget,
            "target": target,
            "actions": action or ACTIONS,
            "bits": bits or BITS,
            "biased": biased,
            "progress": _progress,
        }
        if target is not None and not calibrate:
            _use_the_cpu()
        make_step = _make_step(model, image, dtype, target, fsdp)
        with _recorded_interrupt(interrupted):
            if max_batch:
                batch = planning.largest_batch(make_step, **allowed)
            plan = planning.fit(
                make_step,
                batch=batch,
                **allowed,
                pin=dict(_pinned(text) for text in pin or ()),
                split_batch_statistics=split_batch_statistics,
                compiles=compiles,
                calibrate=calibrate,
            )
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except planning.DoesNotFitError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None
    except (ValueError, ImportError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    print(plan)
    if json is not None:
        plan.save(json)
    if png is not None:
        try:
            plan.draw(png)
        except (ImportError, ValueError) as error:
            raise typer.BadParameter(f"--png={png}: {error}") from error


def _pinned(text: str) -> tuple[str, str]:
    path, found, choice = text.partition("=")
    if not found:
        raise ValueError(f"--pin={text}: expected PATH=CHOICE, such as head=keep")
    return path, choice


def _use_the_cpu() -> None:
    """Makes JAX use the CPU only, unless JAX_PLATFORMS says otherwise.

    A step that is compiled for a named target needs no device. A factory's arrays then take no
    memory of a GPU, and JAX does not report plugins that find no device.
    """
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")


def _make_step(model: str, image: int, dtype: str, target: str | None, fsdp: bool) -> MakeStep:
    """The step factory of a model by name, or the user's own."""
    module, colon, function = model.partition(":")
    if not colon:
        count = 1 if target is None else resolve(target).devices
        mesh = None if count == 1 else memory.mesh(str(target), (count,), ("data",))
        return steps.classifier(model, image, dtype, mesh, fsdp=fsdp)
    if fsdp:
        raise ValueError("--fsdp: expected a model by name; a step factory has its own shardings")
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
        raise ValueError(f"{file}: expected a file in a folder that exists")


@contextlib.contextmanager
def _recorded_interrupt(interrupted: threading.Event) -> Iterator[None]:
    """Within the context Ctrl-C sets the event and raises KeyboardInterrupt.

    The exception alone is not enough. Python drops it if Ctrl-C comes while XLA compiles and JAX's
    callback for garbage collection is the first Python code that runs afterwards.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _print_row(row: planning.Row) -> None:
    """Prints the main figures of a row to stderr."""
    report = row.report
    if report is None:
        figures = f"failed: {row.error}"
    else:
        total = known(report.total_bytes, format_bytes)
        traffic = known(report.hbm_traffic_bytes, format_bytes)
        figures = f"{total} in total, {traffic} of HBM traffic"
    print(f"{row.name}: {figures}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _progress(name: str) -> Iterator[None]:
    with Console(stderr=True).status(f"compiling {name}"):
        yield
