"""What XLA makes of a ResNet's training step, several ways, for a device that need not be here.

    python -m experiments.bench.memory --target h100 --out experiments/results/memory-h100

Nothing is run: each step is compiled, and XLA's own memory analysis is read.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import typer
from flax import nnx
from rich.console import Console

from experiments import step
from experiments.config import DTYPES
from experiments.record import describe_environment, write_json
from experiments.ways import Way
from jaxcomp import memory
from jaxcomp.models import resnet

WAYS = ("plain", "remat", "accumulate:4", "avg_pool:window=2", "quantize:bits=4", "quantize:bits=2")
HEADER = (
    "way",
    "declared residuals",
    "temp",
    "peak",
    "peak / plain",
    "HBM traffic / plain",
    "compile seconds",
)


def analyze(
    way: str, model: str, batch: int, image: int, dtype: str, target: str | None
) -> memory.MemoryReport:
    """Compiles one training step (SGD with momentum, state donated) for the target."""
    parsed = Way.parse(way)
    parsed.check_batch(batch, devices=1)
    network = nnx.eval_shape(
        lambda: resnet.create(
            model,
            num_classes=1000,
            rules=parsed.rules,
            remat=parsed.remat,
            dtype=DTYPES[dtype],
            rngs=nnx.Rngs(0),
        )
    )
    optimizer = step.sgd(lambda count: 0.1, momentum=0.9, nesterov=False, weight_decay=1e-4)
    train_step = step.make_train_step(
        step.make_loss(network, label_smoothing=0.1), optimizer, parsed.micro_batches
    )
    state = jax.eval_shape(lambda: step.init_state(network, optimizer))
    images = jax.ShapeDtypeStruct((batch, image, image, 3), DTYPES[dtype])
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return memory.analyze(train_step, state, images, labels, target=target)


def cells(way: str, report: memory.MemoryReport, plain: memory.MemoryReport) -> tuple[str, ...]:
    """A row of the table, under :data:`HEADER`."""

    def mebibytes(count: int | None) -> str:
        return "not given" if count is None else f"{count / 2**20:.0f} MiB"

    def ratio(count: int | None, of: int | None) -> str:
        return "not given" if count is None or of is None else f"{count / of:.2f}"

    return (
        way,
        mebibytes(report.declared_residual_bytes),
        mebibytes(report.temp_bytes),
        mebibytes(report.peak_bytes),
        ratio(report.peak_bytes, plain.peak_bytes),
        ratio(report.hbm_traffic_bytes, plain.hbm_traffic_bytes),
        "not given" if report.compile_seconds is None else f"{report.compile_seconds:.0f}",
    )


def tabulate(
    ways: Sequence[str],
    analyze_way: Callable[[str], memory.MemoryReport],
    settings: dict[str, Any],
    out: Path,
) -> None:
    """Compiles each way, prints the table as it grows, writes memory.json and memory.md.

    Raises:
        ValueError: the first way is not ``plain``, against which the ratios are.
    """
    if ways[0] != "plain":
        raise ValueError(f"ways={list(ways)!r}: expected plain first, for the ratios")
    console = Console()
    reports: dict[str, memory.MemoryReport] = {}
    lines = ["| " + " | ".join(HEADER) + " |", "|" + " --- |" * len(HEADER)]
    for way in ways:
        with console.status(f"compiling {way}"):
            reports[way] = analyze_way(way)
        lines.append("| " + " | ".join(cells(way, reports[way], reports["plain"])) + " |")
        console.print(lines[-1], highlight=False)
    content: dict[str, Any] = describe_environment() | settings
    content["rows"] = [{"row": way} | settings | r.to_dict() for way, r in reports.items()]
    write_json(out / "memory.json", content)
    (out / "memory.md").write_text("\n".join([*lines, "", f"    {content['command']}"]) + "\n")


def main(
    out: Annotated[Path, typer.Option(help="Directory of the results.")],
    way: Annotated[
        list[str] | None, typer.Option(help="A row; repeat for more, plain first. Default: six.")
    ] = None,
    model: str = "resnet50",
    batch: int = 128,
    image: Annotated[int, typer.Option(help="Height and width of the images.")] = 224,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Of the computation.")
    ] = "bfloat16",
    target: Annotated[
        str | None, typer.Option(help="As jaxcomp.memory.targets; default: the attached device.")
    ] = None,
) -> None:
    """Compiles a training step several ways; writes memory.json and memory.md."""
    settings: dict[str, Any] = {"model": model, "batch": batch, "image": image, "dtype": dtype}
    try:
        tabulate(way or WAYS, lambda spec: analyze(spec, **settings, target=target), settings, out)
    except (ValueError, ImportError) as error:
        raise typer.BadParameter(str(error)) from error


if __name__ == "__main__":
    typer.run(main)
