"""Effect of quantized activations on accuracy (arXiv:2104.14129, arXiv:2208.04187).

    python -m experiments.reproduce.quantization --epochs 4 --out experiments/results/quantization

Trains a ResNet exactly and with each quantizing recipe, as `experiments.comparison.compare` does.
All use the same seeds, so the same initial parameters and order of the data. The table has the
difference from the exact run of the same seed, with its 95% confidence interval.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import typer

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
from experiments.common.record import describe_environment, write_json, write_table
from experiments.comparison.compare import compare_seeds
from experiments.comparison.paired import difference
from experiments.comparison.rows import Row
from experiments.training.config import TrainConfig

STRATEGIES = (
    "plain",
    "remat",
    "actnn",
    "division",
    "fused:bits=4",
    "fused:bits=2",
    "fused:bits=2,scale_source=range",
)


@usage_errors()
def main(
    out: Out,
    strategy: TrainedStrategies = None,
    seed: Annotated[
        list[int] | None, typer.Option(help="Repeatable, two or more. Default: 0 to 4.")
    ] = None,
    model: Model = TrainConfig.model,
    dataset: DatasetName = TrainConfig.dataset,
    data_dir: DataDir = None,
    epochs: Epochs = TrainConfig.epochs,
    batch: Batch = TrainConfig.batch,
    plan_steps: Annotated[
        int | None,
        typer.Option(help="Steps between two plans of the bits of strategies that quantize."),
    ] = None,
) -> None:
    """Train and compare; the same command resumes."""
    config = TrainConfig(
        model=model,
        dataset=dataset,
        data_dir=data_dir,
        epochs=epochs,
        batch=batch,
        plan_steps=plan_steps,
    )
    seeds = seed or list(range(5))
    rows = compare_seeds(config, strategy or STRATEGIES, seeds, out)
    table = paired(rows)
    content = {"config": config.to_json(), "seeds": seeds} | describe_environment()
    write_json(out / "paired.json", content | {"rows": table})
    title = (
        f"Test accuracy of {len(seeds)} seeds, and difference from the exact run of the same seed:"
    )
    typer.echo(write_table(out / "paired.md", title, table, content["command"]))


def paired(rows: Sequence[Row]) -> list[list[str]]:
    """Returns a table of accuracies with the difference from the first row, in points."""
    table = [["strategy", "test accuracy", "difference, 95% interval"]]
    for row in rows:
        mine, first = (100 * np.asarray(some.test_accuracy) for some in (row, rows[0]))
        accuracy = f"{mine.mean():.2f}% ± {mine.std(ddof=1):.2f}%"
        table.append(
            [row.strategy, accuracy, difference(mine, first) if row is not rows[0] else ""]
        )
    return table


if __name__ == "__main__":
    typer.run(main)
