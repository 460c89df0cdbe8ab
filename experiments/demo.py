"""Trains a small ResNet on real images by six strategies, then compiles a large one for a GPU.

python -m experiments.demo
"""

import tempfile
from pathlib import Path

import typer

from experiments.common.cache import compilation_cache
from experiments.common.options import Out, usage_errors
from experiments.common.record import make_folder
from experiments.comparison import before_after
from experiments.comparison.compare import STRATEGIES, compare, report
from experiments.training.config import TrainConfig
from experiments.zoo.steps import NETWORKS
from jaxcomp import memory

CONFIG = TrainConfig(
    model="resnet20",
    dataset="fashion_mnist_embedded",
    epochs=1,
    epoch_steps=48,
    batch=64,
    warmup_epochs=0.2,
    augment=False,
)
STEP, BATCH, TARGET = NETWORKS["resnet50_nnx"].make_step, 320, "rtx3060-12gb"
TITLE = "A training step of a stock ResNet-50 with 320 images"
CAPACITY = "all bytes of a 12 GB card", 12 * 2**30


@usage_errors()
def main(
    out: Out = Path("build/demo"),
) -> None:
    """Train a ResNet by six strategies, compile a large one twice; write tables and figures."""
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
        "plain and remat compute the same function up to rounding. Differences as small as "
        "theirs are noise in such a short run.\n\n"
        f"compiling a ResNet-50 twice for {TARGET}, about a minute"
    )
    timelines = before_after.compile_both(STEP, BATCH, TARGET)
    before_after.draw(out / "memory.png", TITLE, timelines, CAPACITY)
    memory.draw_html(out / "memory.html", timelines, limit=CAPACITY[1])
    typer.echo(before_after.sentence(TITLE, TARGET, timelines))
    typer.echo(f"written: {out}/memory.png and .html")


if __name__ == "__main__":
    typer.run(main)
