"""Trains a small ResNet on real images by six strategies, in a few minutes.

python -m experiments.demo
"""

import tempfile
from pathlib import Path

import typer

from experiments.cache import compilation_cache
from experiments.compare import STRATEGIES, compare, report
from experiments.config import TrainConfig
from experiments.options import Out, usage_errors
from experiments.record import make_folder

CONFIG = TrainConfig(
    model="resnet20",
    dataset="fashion_mnist_embedded",
    epochs=1,
    epoch_steps=48,
    batch=64,
    warmup_epochs=0.2,
    augment=False,
)


@usage_errors()
def main(
    out: Out = Path("experiments/results/demo"),
) -> None:
    """Train a ResNet by six strategies; print a table and write it with a figure."""
    make_folder(out)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        with compilation_cache(scratch / "compiled"):
            rows = compare(CONFIG, STRATEGIES, [CONFIG.seed], scratch / "runs", rounds=5)
    if rows is None:
        typer.echo("stopped")
        raise typer.Exit(130)
    report(CONFIG, [CONFIG.seed], rows, out)
    typer.echo(
        "plain and remat compute the same function up to rounding. A difference in accuracy as "
        "small as theirs is the noise of so short a training."
    )


if __name__ == "__main__":
    typer.run(main)
