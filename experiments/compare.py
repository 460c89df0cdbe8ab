"""Trains the same model by several strategies and puts the results side by side.

    python -m experiments.compare --strategy plain --strategy quantize:bits=2 --epochs 2 --out results/two

Interrupted, the same command goes on where it stopped; finished runs are kept.
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

from experiments.checkpoint import Checkpoints
from experiments.config import TrainConfig
from experiments.data import load
from experiments.figure import draw
from experiments.measure import measure
from experiments.options import DataDir, Dtype, Out, TrainedStrategies, usage_errors
from experiments.planning import quantized_bits
from experiments.record import describe_environment, make_folder, write_json
from experiments.rows import Row
from experiments.train import METRICS, train

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
        config: of all runs, but for the strategy and the seed; ``plan_steps`` is of strategies that quantize.
        strategies: the rows; the first must be ``plain``.
        seeds: of the runs.
        runs: directory for the runs' own directories. What is finished there is not trained again,
            what is not goes on.
        rounds: timed steps of each strategy.
        tensorboard: whether the runs write TensorBoard scalars.

    Returns:
        The rows; None where Ctrl-C stopped a run.

    Raises:
        ValueError: an argument is wrong, or ``runs`` has runs of another configuration.
    """
    if config.plan_steps is not None and not any(map(quantized_bits, strategies)):
        raise ValueError(
            f"plan_steps={config.plan_steps}: expected a strategy that quantizes in {strategies}"
        )
    dataset = load(config.dataset, config.data_dir)
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
    """The directory of a run."""
    name = re.sub(r"[^\w.=,-]+", "_", strategy)
    return runs / f"{name}-{seed}"


def _finish(config: TrainConfig, out: Path, tensorboard: bool) -> dict[str, Any] | None:
    """The metrics of a run, which is trained to its end; None where Ctrl-C stopped it."""
    path = out / METRICS
    if not path.exists():
        resume = Checkpoints(out / "checkpoints").latest_step() is not None
        if not train(config, out, resume=resume, tensorboard=tensorboard).finished:
            return None
    metrics: dict[str, Any] = json.loads(path.read_text())
    config.check_same_run(TrainConfig.from_json(metrics["config"]), out)
    return metrics


def report(config: TrainConfig, seeds: Sequence[int], rows: Sequence[Row], out: Path) -> None:
    """Prints the comparison and writes comparison.json, comparison.md and comparison.png."""
    table = Table(title=f"{config.model} on {config.dataset}, batch {config.batch}")
    for name in HEADER:
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
    lines = [HEADER, ["---"] * len(HEADER), *(row.cells() for row in rows)]
    markdown = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    text = "\n\n".join([markdown, *notes(rows), f"    {content['command']}"])
    (out / "comparison.md").write_text(text + "\n")
    draw(rows, out / "comparison.png")
    console.print(f"written: {out}/comparison.json, .md and .png")


def compare_seeds(
    config: TrainConfig, strategies: Sequence[str], seeds: Sequence[int], out: Path
) -> list[Row]:
    """Compares with several seeds and reports, for a command line; runs are under ``out / "runs"``.

    Raises:
        ValueError: the first strategy is not ``plain``, or there is one seed.
        typer.Exit: Ctrl-C stopped a run.
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
    """Rows, reported; without any the command was stopped, and says so."""
    if rows is None:
        typer.echo("stopped; the same command goes on")
        raise typer.Exit(130)
    report(config, seeds, rows, out)
    return rows


def notes(rows: Sequence[Row]) -> list[str]:
    """What to know to read the table."""
    target = rows[0].measurement.target
    return [
        f"Compiled for {target}: XLA's temp bytes of the whole "
        "training step." + (" On a CPU XLA gives no peak figure." if target == "cpu" else ""),
        "Bits / element: declared bits for each float that the plain step declares. Of accumulate "
        "these are the residuals of one micro-batch, by whose statistics BatchNorm normalises.",
    ]


@usage_errors()
def main(
    out: Out,
    runs: Annotated[Path | None, typer.Option(help="Of the runs; default OUT/runs.")] = None,
    strategy: TrainedStrategies = None,
    seed: Annotated[list[int] | None, typer.Option(help="Repeat for more. Default: 0.")] = None,
    model: str = TrainConfig.model,
    dataset: str = TrainConfig.dataset,
    data_dir: DataDir = None,
    epochs: int = TrainConfig.epochs,
    batch: int = TrainConfig.batch,
    lr: float = TrainConfig.lr,
    dtype: Dtype = TrainConfig.dtype,
    rounds: Annotated[int, typer.Option(help="Timed steps of each strategy.")] = 10,
    tensorboard: bool = True,
) -> None:
    """Trains a model by several strategies and compares; the same command again goes on."""
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
