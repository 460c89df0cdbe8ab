"""Trains small networks on text and images by several strategies, with the same seeds.

    python -m experiments.reproduce.transformers --out experiments/results/transformers

`lm` is a byte-level language model of the Python language reference that is part of Python; a tenth
of it is held out. `lora` adapts that model to source code. `vit` is a vision transformer and
`diffusion` a U-Net that predicts noise, both on the embedded Fashion-MNIST. All are plain Flax.
With the same seed all strategies have the same initial parameters and batches. After an interrupt
the same command resumes.
"""

import json
import re
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from matplotlib.figure import Figure
from rich.progress import track

from experiments.common.options import Out, TrainedStrategies, usage_errors
from experiments.common.palette import COLORS
from experiments.common.record import describe_environment, make_folder, write_json, write_table
from experiments.comparison.paired import difference
from experiments.comparison.rows import mebibytes
from experiments.reproduce.runs import SMOOTHING, Runs, Task
from experiments.reproduce.tasks import TASKS

STRATEGIES = ("plain", "remat", "transformer:bits=4", "transformer:bits=2")


def draw(runs: dict[str, list[dict[str, Any]]], unit: str, path: Path) -> None:
    """Draws the mean training loss of the seeds, with their range."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for (strategy, found), color in zip(runs.items(), COLORS, strict=False):
        curves = np.array([run["loss"] for run in found])
        at = (np.arange(curves.shape[1]) + 0.5) * SMOOTHING
        axes.plot(at, curves.mean(0), color=color, label=strategy)
        axes.fill_between(at, curves.min(0), curves.max(0), color=color, alpha=0.15, linewidth=0)
    title = "Mean training loss of the seeds, and their range"
    axes.set(xlabel="step", ylabel=f"training loss, {unit}", title=title)
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    figure.savefig(path, dpi=150)


def rows(runs: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    """Returns the table: each strategy compared with the first, seed by seed."""
    header = "strategy", "validation loss", "difference", "accuracy", "difference, points"
    table = [[*header, "declared", "XLA temp"]]
    first = next(iter(runs.values()))
    for strategy, found in runs.items():
        losses, others = ([run["validation_loss"] for run in some] for some in (found, first))
        accuracies = ["", ""]
        if first[0]["validation_accuracy"] is not None:
            right, others_right = (
                [100 * run["validation_accuracy"] for run in some] for some in (found, first)
            )
            accuracies = [
                f"{np.mean(right):.2f}% ± {np.std(right, ddof=1):.2f}%",
                difference(right, others_right),
            ]
        table.append(
            [
                strategy,
                f"{np.mean(losses):.4f} ± {np.std(losses, ddof=1):.4f}",
                difference(losses, others, 4),
                *accuracies,
                mebibytes(found[0]["declared_bytes"]),
                mebibytes(found[0]["temp_bytes"]),
            ]
        )
    return table


@usage_errors()
def main(
    out: Out,
    task: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(TASKS)}; repeatable. Default: all.")
    ] = None,
    strategy: TrainedStrategies = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds, 2 or more.", min=2)] = 5,
    steps: Annotated[int, typer.Option(help="Training steps.", min=SMOOTHING)] = 300,
) -> None:
    """Train every strategy with every seed; write runs.json, .md and .png for each task."""
    unknown = set(task or ()) - set(TASKS)
    if unknown:
        raise typer.BadParameter(f"task={sorted(unknown)}: expected of {list(TASKS)}")
    for name in task or TASKS:
        _compare(TASKS[name](), strategy or list(STRATEGIES), seeds, steps, out / name)


def _compare(task: Task, strategies: list[str], seeds: int, steps: int, out: Path) -> None:
    make_folder(out / "runs")
    runs: dict[str, list[dict[str, Any]]] = {}
    for name in track(strategies, "training"):
        stem = re.sub(r"[^\w=]+", "_", name)
        files = [out / "runs" / f"{stem}-{seed}-{steps}.json" for seed in range(seeds)]
        missing = [seed for seed, file in enumerate(files) if not file.exists()]
        of_strategy = Runs(task, name, steps) if missing else None
        for seed in missing:
            assert of_strategy is not None
            write_json(files[seed], of_strategy.run(seed))
        runs[name] = [json.loads(file.read_text()) for file in files]
    content = describe_environment() | {"steps": steps, "data": task.data, "runs": runs}
    write_json(out / "runs.json", content)
    title = (
        f"After {steps} steps, {seeds} seeds, mean ± standard deviation, losses in {task.unit}. "
        "Difference from the first row with the same seed, with its 95% interval:"
    )
    typer.echo(write_table(out / "runs.md", title, rows(runs), content["command"]))
    draw(runs, task.unit, out / "runs.png")


if __name__ == "__main__":
    typer.run(main)
