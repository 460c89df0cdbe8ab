"""Measures training steps on the attached device: compile time, memory in use and step time.

    python -m experiments.bench.device --out experiments/results/device
    python -m experiments.bench.device --model resnet50 --model lm --jobs 6 --profile --out OUT
    python -m experiments.bench.device --model lm --strategy plain --strategy remat --out OUT

A device reports only the peak of a whole process, which includes the kernels that the compiler
tries out. So each step is compiled in one process, which writes the program to a file, and run in
another. The steps of a model are then timed in a single process, in turns, so that other load on
the device affects all of them alike. A turn is `STEPS` steps, which hides the time that the host
takes to start them. Parameters, images and tokens are random.

Each model has a folder, such as `resnet50-h200`. With `--profile` there is `kernels-resnet50-h200`,
too (`experiments.bench.kernels`).
"""

import multiprocessing
import os
import pickle
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import typer
from jax.experimental import serialize_executable
from rich.progress import track

from experiments.bench import kernels
from experiments.bench.transformers import CASES
from experiments.common.cache import compilation_cache
from experiments.common.options import Dtype, Image, Out, Strategies, usage_errors
from experiments.common.record import describe_environment, make_folder, write_json, write_table
from experiments.comparison.measure import in_turns, ratio
from experiments.training.config import DTYPES
from jaxcomp import memory
from jaxcomp.models import steps
from jaxcomp.planning import Strategy

STRATEGIES = {
    "resnet50": (
        *("plain", "remat", "accumulate:4", "quantize:bits=2"),
        *("fused:bits=4", "fused:bits=4,kernels=true", "automatic:bits=3", "fused:bits=2"),
    ),
    "efficientnet_b0": ("plain", "remat", "automatic", "automatic:kernels=true"),
    **{
        name: ("plain", "remat", "accumulate:2", "transformer:bits=4", "transformer:bits=2")
        for name in ("lm", "scanned_lm", "vit_b16")
    },
}
DEFAULT = "plain", "remat", "automatic"
STEPS = 5  # steps of a turn
QUERY = "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "temperature.gpu"
Step = tuple[Any, tuple[Any, ...]]  # a jitted function


class Program(NamedTuple):
    """A compiled step.

    Attributes:
        run: Runs it.
        shapes: Shapes of its arguments.
        hlo_text: Text of the program.
    """

    run: Callable[..., Any]
    shapes: tuple[Any, ...]
    hlo_text: str


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


def compiled(file: Path, *described: Any) -> dict[str, Any]:
    """Compiles a step, writes it to a file, and returns the compile time and XLA's figures."""
    step, shapes = make_step(*described)
    lowered = step.lower(*shapes)
    with tempfile.TemporaryDirectory() as folder, compilation_cache(Path(folder)):
        started = time.perf_counter()
        program = lowered.compile()
        seconds = time.perf_counter() - started
        payload = serialize_executable.serialize(program)
        file.write_bytes(pickle.dumps((payload, shapes, program.as_text())))
        report = memory.analyze(step, *shapes)  # which finds the program in the cache
    figures = "peak_bytes", "total_bytes", "hbm_traffic_bytes"
    return {"compile_seconds": seconds} | {name: getattr(report, name) for name in figures}


def read(file: Path) -> Program:
    """Reads the program that `compiled` wrote."""
    (program, inputs, outputs), shapes, hlo_text = pickle.loads(file.read_bytes())
    run = serialize_executable.deserialize_and_load(
        program, inputs, outputs, execution_devices=jax.local_devices()[:1]
    )
    return Program(run, shapes, hlo_text)


def most_in_use(file: Path) -> int | None:
    """Returns the peak bytes in use on the device in three steps; None if it reports none."""
    step, shapes, _ = read(file)
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


def new_processes(count: int) -> ProcessPoolExecutor:
    """Runs each call in a new process."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(count, spawn, max_tasks_per_child=1)


@usage_errors()
def main(
    out: Out,
    strategy: Strategies = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="A model, as jaxcomp.models.steps.by_name, or of "
            f"{', '.join(CASES)}; repeatable. Default: resnet50."
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(help="Examples in a batch. Default: 128; of a language model its own."),
    ] = None,
    image: Image = 224,
    dtype: Dtype = "bfloat16",
    rounds: Annotated[int, typer.Option(help="Timed turns of each strategy.", min=1)] = 12,
    jobs: Annotated[
        int, typer.Option(help="Processes at once; several make each compilation slower.", min=1)
    ] = 1,
    profile: Annotated[
        bool, typer.Option("--profile", help="Profile the kernels of each step on a GPU, too.")
    ] = False,
) -> None:
    """Compile, run and time the steps of each model; write device.json and device.md."""
    models = model or ["resnet50"]
    for name in strategy or ():
        Strategy.parse(name)
    for name in models:
        if name in CASES and (image, dtype) != (224, "bfloat16"):
            raise ValueError(f"image={image}, dtype={dtype!r}: {name} has its own; leave them out")
    make_folder(out)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes share the device
    described = [
        (row, name, image, dtype, batch or (CASES[name][1] if name in CASES else 128))
        for name in models
        for row in strategy or STRATEGIES.get(name, DEFAULT)
    ]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(i) for i in range(len(described))]
        rows: list[dict[str, Any]] = [{"row": row} for row, *_ in described]
        with new_processes(jobs) as processes:
            compiling = [
                processes.submit(compiled, file, *step)
                for file, step in zip(files, described, strict=True)
            ]
            for row, future in zip(track(rows, "compiling"), compiling, strict=True):
                row |= future.result()
        with new_processes(jobs) as processes:
            running = [processes.submit(most_in_use, file) for file in files]
            for row, peak in zip(track(rows, "running"), running, strict=True):
                row["in_use_bytes"] = peak.result()
        for name in models:
            chosen = [i for i, step in enumerate(described) if step[1] == name]
            settings = {"model": name, "batch": described[chosen[0]][-1], "image": image}
            settings |= {"dtype": dtype, "rounds": rounds, "steps": STEPS, "jobs": jobs}
            of_model = [rows[i] for i in chosen]
            programs = [read(files[i]) for i in chosen]
            _measure(out, of_model, programs, settings)
            if profile:
                _profile(out, [row["row"] for row in of_model], programs, settings)


def _measure(
    out: Path, rows: list[dict[str, Any]], programs: list[Program], settings: dict[str, Any]
) -> None:
    """Times the steps of a model, and writes what was measured."""
    arrays = filled(programs[0].shapes[1:])
    ready = [(several(program.run), filled(program.shapes[0])) for program in programs]
    turns = in_turns(ready, arrays, settings["rounds"])
    for row, times in zip(rows, turns, strict=True):
        row["step_seconds"] = statistics.median(times) / STEPS
        row["step_time_ratio"] = ratio(times, turns[0])
        row["turn_seconds"] = times
    content = settings | {"rows": rows} | clocks() | describe_environment()
    folder = out / _folder(settings["model"])
    write_json(folder / "device.json", content)
    title = (
        f"{settings['model']}, batch {settings['batch']}, {settings['dtype']}, whole training step "
        f"on one {content['devices'][0]}:"
    )
    typer.echo(write_table(folder / "device.md", title, _table(rows), content["command"]))


def _profile(
    out: Path, names: list[str], programs: list[Program], settings: dict[str, Any]
) -> None:
    """Profiles the steps of a model, and writes their kernels."""
    found = {}
    for name, program in zip(names, programs, strict=True):
        state, *arrays = filled(program.shapes)
        trace = kernels.profiled(program.run, state, arrays)
        found[name] = kernels.kernels(program.hlo_text, kernels.durations(trace))
    folder = out / f"kernels-{_folder(settings['model'])}"
    make_folder(folder)
    typer.echo(kernels.write(folder, found, settings | describe_environment()))


def _folder(model: str) -> str:
    """Returns the name of a model's folder: with the last word of the device's name."""
    return f"{model}-{jax.devices()[0].device_kind.split()[-1].lower()}"


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
