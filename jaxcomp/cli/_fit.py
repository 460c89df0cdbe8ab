"""`jaxcomp fit`: the fastest way to fit a step into a budget of memory."""

import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxcomp import planning
from jaxcomp.cli import _options as options
from jaxcomp.cli._errors import told
from jaxcomp.cli._progress import Compilations
from jaxcomp.memory._live_bytes import format_bytes
from jaxcomp.planning._compiled import Compiled
from jaxcomp.planning._fit import ACTIONS, BITS


def fit(
    model: options.Model,
    batch: options.Batch = 128,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Memory that the step may need, such as 11GiB. Default: what it may use of the "
            "target's memory, 75% of a GPU's."
        ),
    ] = None,
    allowance: options.Allowance = None,
    image: options.Image = None,
    dtype: options.Dtype = None,
    target: options.Target = None,
    fsdp: options.Fsdp = False,
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
    no_cache: options.NoCache = False,
    traceback: options.Traceback = False,
    list_models: options.ListModels = False,
    list_targets: options.ListTargets = False,
) -> None:
    """Find the fastest way to fit a training step into a budget of memory.

    Steps are compiled ahead of time. Nothing is run without --calibrate.

    After Ctrl-C the best that was compiled until then is shown.
    """
    progress = Compilations(compiles, is_exact=False)
    interrupted = threading.Event()
    plans: list[planning.FittedPlan] = []

    def show(found: Compiled) -> None:
        fits = "fits" if found.fits else "does not fit"
        total, time = format_bytes(found.total_bytes), f"{found.milliseconds:.2f} ms"
        progress.print(f"{found.name}: {total}, {fits}, estimated {time}")

    with told(interrupted, whole=traceback):
        for file in (json, png):
            options.check_writable(file)
        if png is not None:
            options.check_installed("matplotlib", "--png", "plot")
        allowed: dict[str, Any] = {
            "budget": budget,
            "allowance": allowance,
            "target": target,
            "actions": action or ACTIONS,
            "bits": bits or BITS,
            "biased": biased,
            "progress": progress,
        }
        if target is not None and not calibrate:
            options.use_the_cpu()
        if no_cache:
            options.turn_off_the_cache()
        factory = options.make_step(model, image, dtype, target, fsdp)
        if max_batch:
            batch = planning.largest_batch(factory, **allowed)
        plan = planning.fit(
            factory,
            batch=batch,
            **allowed,
            pin=dict(_pinned(text) for text in pin or ()),
            split_batch_statistics=split_batch_statistics,
            compiles=compiles,
            calibrate=calibrate,
            compiled=show,
        )
        plans.append(plan)
        if json is not None:
            plan.save(json)
        if png is not None:
            plan.draw(png)
    for plan in plans:
        print(plan.text(json or "plan.json"))
        if json is None and plan.policy is not None:
            print("--json plan.json saves the plan.")
    if interrupted.is_set():
        raise typer.Exit(130)


def _pinned(text: str) -> tuple[str, str]:
    path, found, choice = text.partition("=")
    if not found:
        raise ValueError(f"--pin={text}: expected PATH=CHOICE, such as head=keep")
    return path, choice
