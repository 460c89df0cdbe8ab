"""A small ResNet trained on real images six ways, side by side, in a few minutes.

python -m experiments.demo
"""

import tempfile
from pathlib import Path
from typing import Annotated

import jax
import typer

from experiments.compare import WAYS, compare, report
from experiments.config import TrainConfig

CONFIG = TrainConfig(
    model="resnet20",
    dataset="fashion_mnist_embedded",
    epochs=1,
    epoch_steps=48,
    batch=64,
    warmup_epochs=0.2,
    augment=False,
)


def main(
    out: Annotated[Path, typer.Option(help="Directory of the results.")] = Path(
        "experiments/results/demo"
    ),
) -> None:
    """Trains a ResNet six ways; prints a table, writes a picture and a JSON file."""
    with tempfile.TemporaryDirectory() as scratch:
        # A step is compiled to be measured and again to be trained; once is enough.
        jax.config.update("jax_compilation_cache_dir", f"{scratch}/compiled")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
        rows = compare(CONFIG, WAYS, [CONFIG.seed], Path(scratch) / "runs", rounds=5)
    if rows is None:
        typer.echo("stopped")
        raise typer.Exit(130)
    report(CONFIG, [CONFIG.seed], rows, out)


if __name__ == "__main__":
    typer.run(main)
