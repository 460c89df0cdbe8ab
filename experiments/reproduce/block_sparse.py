"""Time, accuracy and memory of a ResMLP with pruned activations (arXiv:2311.16883, section 4).

    python -m experiments.reproduce.block_sparse --epochs 6 --out experiments/results/pruning

Trains a small ResMLP with several densities and block sizes, and by the plain step, remat and
accumulation, as `experiments.comparison.compare` does.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from matplotlib.figure import Figure

from experiments.common.options import (
    Batch,
    DataDir,
    DatasetName,
    Epochs,
    Model,
    Out,
    TrainedStrategies,
    usage_errors,
)
from experiments.common.palette import style
from experiments.comparison.compare import compare_seeds
from experiments.comparison.rows import Row
from experiments.training.config import TrainConfig

STRATEGIES = (
    "plain",
    "remat",
    "accumulate:4",
    "pruning:density=0.1",
    "pruning:density=0.25",
    "pruning:density=0.5",
    "pruning:density=0.25,block=16",
    "pruning:density=0.25,block=1x8",
    "pruning:density=0.25,rest_bits=2",
)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws accuracy over memory and over time; bars are the standard deviation over seeds."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    memory, time = figure.subplots(1, 2, sharey=True)
    for number, row in enumerate(rows):
        accuracy, spread = np.mean(row.test_accuracy), np.std(row.test_accuracy, ddof=1)
        cost = row.measurement
        for axes, x in (
            (memory, (cost.temp_bytes or np.nan) / 2**20),
            (time, cost.step_time_ratio),
        ):
            color, marker = style(number)
            axes.errorbar(
                *(x, 100 * accuracy, 100 * spread),
                label=row.strategy,
                fmt=marker,
                color=color,
                capsize=3,
            )
    memory.set(xlabel="compiled: XLA temp, MiB", ylabel="test accuracy, %")
    time.set(xlabel="step time / plain")
    figure.suptitle("Accuracy over memory and time; bars: standard deviation over seeds")
    figure.legend(*time.get_legend_handles_labels(), frameon=False, loc="outside right center")
    for axes in (memory, time):
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=150)


@usage_errors()
def main(
    out: Out,
    strategy: TrainedStrategies = None,
    seed: Annotated[
        list[int] | None, typer.Option(help="Repeatable, two or more. Default: 0, 1, 2.")
    ] = None,
    model: Model = "resmlp_tiny",
    dataset: DatasetName = TrainConfig.dataset,
    data_dir: DataDir = None,
    epochs: Epochs = TrainConfig.epochs,
    batch: Batch = TrainConfig.batch,
    lr: Annotated[float, typer.Option(help="Peak learning rate of AdamW.")] = 2e-3,
) -> None:
    """Train, compare and draw; the same command resumes."""
    strategies, seeds = strategy or list(STRATEGIES), seed or [0, 1, 2]
    config = TrainConfig(
        model=model,
        dataset=dataset,
        data_dir=data_dir,
        optimizer="adamw",
        epochs=epochs,
        batch=batch,
        lr=lr,
    )
    draw(compare_seeds(config, strategies, seeds, out), out / "accuracy.png")


if __name__ == "__main__":
    typer.run(main)
