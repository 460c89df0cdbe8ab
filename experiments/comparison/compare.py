r"""Trains a model by several strategies and compares accuracy, memory and step time.

    python -m experiments.comparison.compare --strategy plain --strategy quantize:bits=2 \
        --epochs 2 --out results/two

After an interrupt the same command resumes. Finished runs are kept.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from experiments.common.options import (
    Batch,
    DataDir,
    DatasetName,
    Dtype,
    Epochs,
    Model,
    Out,
    TrainedStrategies,
    usage_errors,
)
from experiments.common.record import describe_environment, make_folder, write_json
from experiments.comparison.figure import draw
from experiments.comparison.measure import measure
from experiments.comparison.rows import Row
from experiments.data.datasets import load
from experiments.training.checkpoint import Checkpoints
from experiments.training.config import TrainConfig
from experiments.training.planning import quantized_bits
from experiments.training.train import METRICS, train

STRATEGIES = (
    "plain",
    "remat",
    "accumulate:2",
    "pooling:window=2",
    "quantize:bits=4",
    "quantize:bits=2",
)
HEADER = (
    "strategy",
    "test accuracy",
    "declared residuals",
    "bits / element",
    "compiled: XLA temp",
    "step time / plain",
)


def compare(
    config: TrainConfig,
    strategies: Sequence[str],
    seeds: Sequence[int],
    runs: Path,
    *,
    rounds: int = 10,
    tensorboard: bool = False,
) -> list[Row] | None:
    """Trains every strategy with every seed, one after another, and measures their steps.

    Args:
        config: Configuration of all runs. Strategy and seed are replaced; `plan_steps` applies to
            strategies that quantize.
        strategies: Specs of the strategies; the first must be `plain`.
        seeds: Seeds of the runs.
        runs: Folder for the folders of the runs. A finished run in it is not repeated, an
            unfinished run is resumed.
        rounds: Timed steps of each strategy.
        tensorboard: Whether the runs write TensorBoard scalars.

    Returns:
        The rows; None if Ctrl-C stopped a run.

    Raises:
        ValueError: If an argument is wrong, or `runs` has runs of another configuration.
    """
    if config.plan_steps is not None and not any(map(quantized_bits, strategies)):
        raise ValueError(
            f"plan_steps={config.plan_steps}: expected a strategy that quantizes in {strategies}"
        )
    dataset = load(config.dataset, config.data_dir)
    typer.echo(f"compiling and timing the steps of {', '.join(strategies)}")
    measured = measure(config, strategies, dataset, rounds)
    rows = []
    for strategy in strategies:
        finished = []
        for seed in seeds:
            plan_steps = config.plan_steps if quantized_bits(strategy) else None
            run_config = replace(config, strategy=strategy, seed=seed, plan_steps=plan_steps)
            metrics = _finish(run_config, run_folder(runs, strategy, seed), tensorboard)
            if metrics is None:
                return None
            finished.append(metrics)
        accuracies = [metrics["test_accuracy"][-1] for metrics in finished]
        loss = [round(x, 4) for x in finished[0]["loss"]]
        rows.append(Row(strategy, accuracies, loss, measured[strategy]))
    return rows


def run_folder(runs: Path, strategy: str, seed: int) -> Path:
    """Returns the folder of a run."""
    name = re.sub(r"[^\w.=,-]+", "_", strategy)
    return runs / f"{name}-{seed}"


def _finish(config: TrainConfig, out: Path, tensorboard: bool) -> dict[str, Any] | None:
    """Finishes a run and returns its metrics; None if Ctrl-C stopped it."""
    path = out / METRICS
    if not path.exists():
        resume = Checkpoints(out / "checkpoints").latest_step() is not None
        if not train(config, out, resume=resume, tensorboard=tensorboard).finished:
            return None
    metrics: dict[str, Any] = json.loads(path.read_text())
    config.check_same_run(TrainConfig.from_json(metrics["config"]), out)
    return metrics


def report(config: TrainConfig, seeds: Sequence[int], rows: Sequence[Row], out: Path) -> None:
    """Prints the comparison and writes comparison.json, comparison.md and comparison.png.

    The accuracy of one seed is in comparison.json alone.
    """
    table = Table(title=f"{config.model} on {config.dataset}, batch {config.batch}")
    header = [name for name in HEADER if name != "test accuracy" or len(seeds) > 1]
    for name in header:
        table.add_column(
            name, justify="left" if name == "strategy" else "right", no_wrap=name == "strategy"
        )
    for row in rows:
        table.add_row(*row.cells())
    console = Console()
    console.print(table)
    for note in notes(rows):
        console.print(note)

    content = {"config": config.to_json(), "seeds": list(seeds)} | describe_environment()
    content |= {"rows": [asdict(row) for row in rows]}
    write_json(out / "comparison.json", content)
    lines = [header, ["---"] * len(header), *(row.cells() for row in rows)]
    markdown = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    text = "\n\n".join([markdown, *notes(rows), f"    {content['command']}"])
    (out / "comparison.md").write_text(text + "\n")
    draw(rows, out / "comparison.png")
    console.print(f"written: {out}/comparison.json, .md and .png")


def compare_seeds(
    config: TrainConfig, strategies: Sequence[str], seeds: Sequence[int], out: Path
) -> list[Row]:
    """Compares with several seeds and reports, for a command; runs are in `out / "runs"`.

    Raises:
        ValueError: If the first strategy is not `plain`, or there are fewer than two seeds.
        typer.Exit: If Ctrl-C stopped a run.
    """
    if len(seeds) < 2 or len({*seeds}) != len(seeds) or strategies[0] != "plain":
        raise ValueError(
            f"strategy={strategies}, seed={seeds}: expected plain first, 2 or more seeds, each once"
        )
    make_folder(out)
    return _reported(compare(config, strategies, seeds, out / "runs"), config, seeds, out)


def _reported(
    rows: list[Row] | None, config: TrainConfig, seeds: Sequence[int], out: Path
) -> list[Row]:
    """Reports the rows and returns them; exits if Ctrl-C stopped a run."""
    if rows is None:
        typer.echo("stopped; the same command resumes")
        raise typer.Exit(130)
    report(config, seeds, rows, out)
    return rows


def notes(rows: Sequence[Row]) -> list[str]:
    """Returns the notes below the table."""
    target = rows[0].measurement.target
    return [
        f"XLA temp: temporary memory of the whole training step, compiled for {target}."
        + (" On a CPU XLA reports no peak memory." if target == "cpu" else ""),
        "Bits / element: declared bits for each float that the plain step declares. For accumulate "
        "both count one micro-batch, whose statistics the batch norms use.",
    ]


@usage_errors()
def main(
    out: Out,
    runs: Annotated[
        Path | None, typer.Option(help="Folder for the runs. Default: OUT/runs.")
    ] = None,
    strategy: TrainedStrategies = None,
    seed: Annotated[list[int] | None, typer.Option(help="Repeatable. Default: 0.")] = None,
    model: Model = TrainConfig.model,
    dataset: DatasetName = TrainConfig.dataset,
    data_dir: DataDir = None,
    epochs: Epochs = TrainConfig.epochs,
    batch: Batch = TrainConfig.batch,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = TrainConfig.lr,
    dtype: Dtype = TrainConfig.dtype,
    rounds: Annotated[int, typer.Option(help="Timed steps of each strategy.")] = 10,
    tensorboard: Annotated[
        bool, typer.Option(help="Whether runs write TensorBoard scalars.")
    ] = True,
) -> None:
    """Train a model by several strategies and compare; the same command resumes."""
    seeds = seed or [0]
    config = TrainConfig(
        model=model,
        dataset=dataset,
        data_dir=data_dir,
        epochs=epochs,
        batch=batch,
        lr=lr,
        dtype=dtype,
    )
    make_folder(out)
    rows = compare(
        config,
        strategy or STRATEGIES,
        seeds,
        runs or out / "runs",
        rounds=rounds,
        tensorboard=tensorboard,
    )
    _reported(rows, config, seeds, out)


if __name__ == "__main__":
    typer.run(main)
