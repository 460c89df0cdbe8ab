"""Compiles a large ResNet for a GPU, then trains a small one on real images by five strategies.

python -m experiments.demo
"""

import tempfile
from pathlib import Path

import typer

from experiments.common.cache import compilation_cache
from experiments.common.options import Out, usage_errors
from experiments.common.record import make_folder
from experiments.comparison import before_after
from experiments.comparison.compare import compare, report
from experiments.training.config import TrainConfig
from experiments.zoo.steps import NETWORKS
from jaxcomp import memory

STEP, BATCH, TARGET = NETWORKS["resnet50_nnx"].make_step, 320, "rtx3060-12gb"
TITLE = "A training step of a stock ResNet-50 with 320 images"
CAPACITY = "all bytes of a 12 GB card", 12 * 2**30
CONFIG = TrainConfig(
    model="resnet20",
    dataset="fashion_mnist_embedded",
    epochs=1,
    epoch_steps=48,
    batch=64,
    warmup_epochs=0.2,
    augment=False,
)
STRATEGIES = "plain", "remat", "accumulate:2", "automatic", "quantize:bits=2"  # for CONFIG
NOTE = (
    "automatic is what jaxcomp.compress(model) does. 48 steps of one seed say nothing about "
    "accuracy; docs/benchmarks/measured.md has 20 seeds."
)
NEXT = "next: jaxcomp memory resnet50 --batch 128 --target rtx3060-12gb"


@usage_errors()
def main(
    out: Out = Path("build/demo"),
) -> None:
    """Compile a ResNet twice, train a small one by five strategies; write figures and tables."""
    make_folder(out)
    timelines = before_after.compile_both(STEP, BATCH, TARGET)
    before_after.draw(out / "memory.png", TITLE, timelines, CAPACITY)
    memory.draw_html(out / "memory.html", timelines, limit=CAPACITY[1])
    typer.echo(before_after.sentence(TITLE, TARGET, timelines))
    typer.echo(f"written: {out}/memory.png and .html\n")
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        with compilation_cache(scratch / "compiled"):
            rows = compare(CONFIG, STRATEGIES, [CONFIG.seed], scratch / "runs", rounds=5)
    if rows is None:
        typer.echo("stopped")
        raise typer.Exit(130)
    report(CONFIG, [CONFIG.seed], rows, out)
    typer.echo(f"{NOTE}\n{NEXT}")


if __name__ == "__main__":
    typer.run(main)
