"""What quantized residuals do to a network's accuracy (arXiv:2104.14129, arXiv:2208.04187).

    python -m experiments.reproduce.quantization --epochs 4 --out experiments/results/quantization

Trains a ResNet exactly and with each quantizing recipe, as `experiments.compare` does, with the
same seeds, that is the same initialisation and order of the data; the difference from the exact run
of the same seed stands beside with its 95% confidence interval.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import typer

from experiments.compare import compare_seeds
from experiments.config import TrainConfig
from experiments.options import DataDir, Out, TrainedStrategies, usage_errors
from experiments.paired import paired_difference
from experiments.record import describe_environment, write_json, write_table
from experiments.rows import Row

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
    seed: Annotated[list[int] | None, typer.Option(help="Two or more. Default: 0 to 4.")] = None,
    model: str = TrainConfig.model,
    dataset: str = TrainConfig.dataset,
    data_dir: DataDir = None,
    epochs: int = TrainConfig.epochs,
    batch: int = TrainConfig.batch,
    plan_steps: Annotated[
        int | None,
        typer.Option(help="Steps between plans of the bits of strategies that quantize."),
    ] = None,
) -> None:
    """Trains and compares; the same command again goes on."""
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
    title = f"Test accuracy of {len(seeds)} seeds; over the exact run of the same seed:"
    typer.echo(write_table(out / "paired.md", title, table, content["command"]))


def paired(rows: Sequence[Row]) -> list[list[str]]:
    """A table of accuracies beside the first row's, in percentage points."""
    table = [["strategy", "test accuracy", "difference, 95% interval"]]
    for row in rows:
        mean, half_width = paired_difference(row.test_accuracy, rows[0].test_accuracy)
        accuracy, spread = np.mean(row.test_accuracy), np.std(row.test_accuracy, ddof=1)
        difference = f"{100 * mean:+.2f} ± {100 * half_width:.2f}" if row is not rows[0] else ""
        table.append([row.strategy, f"{accuracy:.2%} ± {spread:.2%}", difference])
    return table


if __name__ == "__main__":
    typer.run(main)
