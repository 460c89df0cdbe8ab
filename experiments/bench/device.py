"""Measures training steps on the attached device: compile time, memory in use and step time.

    python -m experiments.bench.device --out experiments/results/device

A device reports only the peak of a whole process, which includes the kernels that the compiler
tries out. So each strategy is compiled in one process and run in another, which reads the program
from JAX's compilation cache. The steps are then timed in a single process, interleaved, so that
other load on the device affects all of them alike. Parameters and images are random.
"""

import multiprocessing
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from rich.progress import track

from experiments.cache import compilation_cache
from experiments.config import DTYPES
from experiments.measure import in_turns, ratio
from experiments.options import Batch, Dtype, Image, Model, Out, Strategies, usage_errors
from experiments.record import describe_environment, make_folder, write_json, write_table
from jaxcomp import memory
from jaxcomp.models import steps
from jaxcomp.planning import Strategy

STRATEGIES = "plain", "remat", "accumulate:4", "quantize:bits=2", "fused:bits=4", "fused:bits=2"
Step = tuple[Callable[..., Any], tuple[Any, ...]]


def make_step(strategy: str, model: str, image: int, dtype: str, batch: int) -> Step:
    """Returns the step of a strategy and the shapes of its arguments."""
    return steps.classifier(model, image, DTYPES[dtype])(Strategy.parse(strategy), batch)


def filled(shapes: Any) -> Any:
    """Returns arrays of these shapes: small random floats, and zeros for integers."""
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))

    def fill(key: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.zeros(leaf.shape, leaf.dtype)
        return (0.1 * jax.random.normal(key, leaf.shape)).astype(leaf.dtype)

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


def use_cache(folder: str) -> None:
    """Makes JAX cache its compiled programs in a folder."""
    jax.config.update("jax_compilation_cache_dir", folder)


def alone(cache: str, task: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function in a new process that has its compilation cache in a folder."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, use_cache, (cache,)) as process:
        return process.submit(task, *arguments).result()


@usage_errors()
def main(
    out: Out,
    strategy: Strategies = None,
    model: Model = "resnet50",
    batch: Batch = 128,
    image: Image = 224,
    dtype: Dtype = "bfloat16",
    rounds: Annotated[int, typer.Option(help="Timed steps of each strategy.", min=1)] = 20,
) -> None:
    """Compile, run and time the step of each strategy; write device.json and device.md."""
    strategies = strategy or list(STRATEGIES)
    for name in strategies:
        Strategy.parse(name)
    make_folder(out)
    rows: list[dict[str, Any]] = [{"row": name} for name in strategies]
    with tempfile.TemporaryDirectory() as folder:
        for row in track(rows, "compiling and running"):
            described = row["row"], model, image, dtype, batch
            row |= alone(folder, compiled, *described)
            row["in_use_bytes"] = alone(folder, most_in_use, *described)
        with compilation_cache(Path(folder)):
            runs = [make_step(name, model, image, dtype, batch) for name in strategies]
            _, (_, *arrays) = runs[0]
            ready = [(step, filled(state)) for step, (state, *_) in runs]
            seconds = in_turns(ready, filled(arrays), rounds)
    for row, times in zip(rows, seconds, strict=True):
        row["step_seconds"] = statistics.median(times)
        row["step_time_ratio"] = ratio(times, seconds[0])
    content = describe_environment() | {"model": model, "batch": batch, "image": image}
    content |= {"dtype": dtype, "rounds": rounds, "rows": rows}
    write_json(out / "device.json", content)
    device = content["devices"][0]
    title = f"{model}, {image}px, batch {batch}, {dtype}, whole SGD step on one {device}:"
    typer.echo(write_table(out / "device.md", title, _table(rows), content["command"]))


def _table(rows: list[dict[str, Any]]) -> list[list[str]]:
    def mebibytes(count: int | None) -> str:
        return "" if count is None else f"{count / 2**20:,.0f}"

    header = ["row", "compile s", "compiled: peak MiB", "total MiB", "in use MiB", "step ms"]
    table = [[*header, f"step / {rows[0]['row']}"]]
    for row in rows:
        sizes = [mebibytes(row[f"{kind}_bytes"]) for kind in ("peak", "total", "in_use")]
        times = f"{1e3 * row['step_seconds']:.1f}", f"{row['step_time_ratio']:.2f}"
        table.append([row["row"], f"{row['compile_seconds']:.1f}", *sizes, *times])
    return table


if __name__ == "__main__":
    typer.run(main)
