"""Measures training steps on the attached device: compile time, memory in use and step time.

    python -m experiments.bench.device --out experiments/results/device
    python -m experiments.bench.device --model lm --strategy plain --strategy remat --out OUT

A device reports only the peak of a whole process, which includes the kernels that the compiler
tries out. So each strategy is compiled in one process and run in another, which reads the program
from JAX's compilation cache. The steps are then timed in a single process, in turns, so that other
load on the device affects all of them alike. A turn is `STEPS` steps, which hides the time that the
host takes to start them. Parameters, images and tokens are random.
"""

import multiprocessing
import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from rich.progress import track

from experiments.bench.transformers import CASES
from experiments.common.cache import compilation_cache
from experiments.common.options import Dtype, Image, Out, Strategies, usage_errors
from experiments.common.record import describe_environment, make_folder, write_json, write_table
from experiments.comparison.measure import in_turns, ratio
from experiments.training.config import DTYPES
from jaxcomp import memory
from jaxcomp.models import steps
from jaxcomp.planning import Strategy

STRATEGIES = "plain", "remat", "accumulate:4", "quantize:bits=2", "fused:bits=4", "fused:bits=2"
STEPS = 5  # steps of a turn
QUERY = "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "temperature.gpu"
Step = tuple[Callable[..., Any], tuple[Any, ...]]


def make_step(strategy: str, model: str, image: int, dtype: str, batch: int) -> Step:
    """Returns the step of a strategy and the shapes of its arguments."""
    if model in CASES:
        return CASES[model][0](Strategy.parse(strategy), batch)
    return steps.by_name(model, image, DTYPES[dtype])(Strategy.parse(strategy), batch)


def filled(shapes: Any) -> Any:
    """Returns arrays of these shapes: small random floats, and integers below 1000.

    Floats are not negative, since some are an optimizer's second moments. Booleans and scalar
    integers are zeros.
    """
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))

    def fill(key: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return 0.1 * jnp.abs(jax.random.normal(key, leaf.shape, leaf.dtype))
        if leaf.ndim == 0 or leaf.dtype == bool:
            return jnp.zeros(leaf.shape, leaf.dtype)
        return jax.random.randint(key, leaf.shape, 0, 1000, leaf.dtype)

    return jax.tree.unflatten(tree, map(fill, keys, leaves))


def compiled(*described: Any) -> dict[str, Any]:
    """Returns the compile time and the figures of the compiled step."""
    step, shapes = make_step(*described)
    report = memory.analyze(step, *shapes)
    figures = "compile_seconds", "peak_bytes", "total_bytes", "hbm_traffic_bytes"
    return {name: getattr(report, name) for name in figures}


def most_in_use(*described: Any) -> int | None:
    """Returns the peak bytes in use on the device in three steps; None if it reports none."""
    step, shapes = make_step(*described)
    state, *batch = filled(shapes)
    for _ in range(3):
        state = jax.block_until_ready(step(state, *batch))[0]
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")


def several(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that runs a step `STEPS` times."""

    def run(state: Any, *batch: Any) -> Any:
        for _ in range(STEPS):
            state, result = step(state, *batch)
        return state, result

    return run


def clocks() -> dict[str, str]:
    """The driver, the clocks and the temperature of the first NVIDIA GPU, if it tells them."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        return {}
    return dict(zip(QUERY, found.stdout.splitlines()[0].split(", "), strict=True))


def use_cache(folder: str) -> None:
    """Makes JAX cache its compiled programs in a folder."""
    jax.config.update("jax_compilation_cache_dir", folder)


def new_processes(cache: str, count: int) -> ProcessPoolExecutor:
    """Runs each call in a new process that has its compilation cache in a folder."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(count, spawn, use_cache, (cache,), max_tasks_per_child=1)


@usage_errors()
def main(
    out: Out,
    strategy: Strategies = None,
    model: Annotated[
        str,
        typer.Option(help=f"A model, as jaxcomp.models.steps.by_name, or of {', '.join(CASES)}."),
    ] = "resnet50",
    batch: Annotated[
        int | None,
        typer.Option(help="Examples in a batch. Default: 128; of a transformer its own."),
    ] = None,
    image: Image = 224,
    dtype: Dtype = "bfloat16",
    rounds: Annotated[int, typer.Option(help="Timed turns of each strategy.", min=1)] = 20,
    jobs: Annotated[
        int, typer.Option(help="Processes at once; several make each compilation slower.", min=1)
    ] = 1,
) -> None:
    """Compile, run and time the step of each strategy; write device.json and device.md."""
    strategies = strategy or list(STRATEGIES)
    for name in strategies:
        Strategy.parse(name)
    if model in CASES and (image, dtype) != (224, "bfloat16"):
        raise ValueError(f"image={image}, dtype={dtype!r}: {model} has its own; leave them out")
    if batch is None:
        batch = CASES[model][1] if model in CASES else 128
    make_folder(out)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes share the device
    rows: list[dict[str, Any]] = [{"row": name} for name in strategies]
    described = [(name, model, image, dtype, batch) for name in strategies]
    content: dict[str, Any] = {"model": model, "batch": batch, "image": image, "dtype": dtype}
    content |= {"rounds": rounds, "steps": STEPS, "jobs": jobs, "rows": rows}
    with tempfile.TemporaryDirectory() as folder:
        with new_processes(folder, jobs) as processes:
            compiling = [processes.submit(compiled, *step) for step in described]
            for row, future in zip(track(rows, "compiling"), compiling, strict=True):
                row |= future.result()
        with new_processes(folder, jobs) as processes:
            running = [processes.submit(most_in_use, *step) for step in described]
            for row, peak in zip(track(rows, "running"), running, strict=True):
                row["in_use_bytes"] = peak.result()
                write_json(out / "device.json", content)
        with compilation_cache(Path(folder)):
            runs = [make_step(*step) for step in described]
            _, (_, *arrays) = runs[0]
            ready = [(several(step), filled(state)) for step, (state, *_) in runs]
            turns = in_turns(ready, filled(arrays), rounds)
    for row, times in zip(rows, turns, strict=True):
        row["step_seconds"] = statistics.median(times) / STEPS
        row["step_time_ratio"] = ratio(times, turns[0])
        row["turn_seconds"] = times
    content |= clocks() | describe_environment()
    write_json(out / "device.json", content)
    device = content["devices"][0]
    title = f"{model}, batch {batch}, {dtype}, whole training step on one {device}:"
    typer.echo(write_table(out / "device.md", title, _table(rows), content["command"]))


def _table(rows: list[dict[str, Any]]) -> list[list[str]]:
    def mebibytes(count: int | None) -> str:
        return "" if count is None else f"{count / 2**20:,.0f}"

    header = ["row", "compile s", "compiled: peak MiB", "total MiB", "traffic", "in use MiB"]
    table = [[*header, "step ms", f"step / {rows[0]['row']}"]]
    for row in rows:
        peak, total, in_use = (
            mebibytes(row[f"{kind}_bytes"]) for kind in ("peak", "total", "in_use")
        )
        traffic, of = (r["hbm_traffic_bytes"] for r in (row, rows[0]))
        moved = f"{traffic / of:.2f}" if traffic and of else ""
        times = f"{1e3 * row['step_seconds']:.2f}", f"{row['step_time_ratio']:.3f}"
        compiled = f"{row['compile_seconds']:.1f}", peak, total, moved, in_use
        table.append([row["row"], *compiled, *times])
    return table


if __name__ == "__main__":
    typer.run(main)
