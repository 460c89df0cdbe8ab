"""Finds the largest batch of a ResNet's training step that fits on GPUs, by several strategies.

    python -m experiments.bench.fits --out experiments/results/fits-resnet50
    python -m experiments.bench.fits --model resnet152 --part h100 --out OUT

Each strategy is compiled for the last GPU at two batch sizes. A line through both estimates the
largest batch that fits, in the 75% of a GPU's memory that JAX preallocates. The largest of these
batches is compiled too. A line through the two largest points gives the batch of each GPU.
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track

from experiments.common.options import Add, Model, Out, Strategies, usage_errors
from experiments.common.record import describe_environment, read_table, write_json, write_table
from jaxcomp import memory
from jaxcomp.memory._targets import resolve
from jaxcomp.models import steps
from jaxcomp.planning import Strategy

STRATEGIES = (
    "plain",
    "remat",
    "accumulate:4",
    "pooling:window=2",
    "quantize:bits=4",
    "quantize:bits=2",
    "fused:bits=4",
    "fused:bits=2",
)
PARTS = ("rtx4060-8gb", "rtx3060-12gb", "rtx4060ti-16gb", "rtx3090")
BATCHES = 64, 128
STEP = 8  # the reported batches are multiples of it


@usage_errors()
def main(
    out: Out,
    strategy: Strategies = None,
    model: Model = "resnet50",
    part: Annotated[
        list[str] | None,
        typer.Option(
            help=f"A GPU; repeatable. Steps are compiled for the last. Default: {', '.join(PARTS)}."
        ),
    ] = None,
    add: Add = False,
) -> None:
    """Find each largest batch; write fits.json and fits.md after every row."""
    make_step = steps.classifier(model)
    strategies = strategy or list(STRATEGIES)
    parts = part or list(PARTS)
    room = {name: resolve(name).usable_bytes or 0 for name in parts}  # known for every GPU

    def needed(name: str, batch: int) -> int:
        step, arguments = make_step(Strategy.parse(name), batch)
        total = memory.analyze(step, *arguments, target=parts[-1], xla_remat=False).total_bytes
        assert total is not None  # the compiler for GPUs reports it
        return total

    rows: list[dict[str, Any]] = []
    if add:
        rows = read_table(out / "fits.json", {"model": model, "usable_bytes": room})["rows"]
    text = ""
    for name in track(strategies, "compiling"):
        points = {batch: needed(name, batch) for batch in BATCHES}
        most = max(STEP, *largest(points, room).values())
        points[most] = needed(name, most)
        rows = [row for row in rows if row["row"] != name]
        rows.append({"row": name, "total_bytes": points, "largest_batch": largest(points, room)})
        text = _write(out, model, room, sorted(rows, key=lambda row: _place(row["row"])))
    typer.echo(text)


def largest(points: dict[int, int], room: dict[str, int], step: int = STEP) -> dict[str, int]:
    """Returns the largest batch of each GPU, 0 if none fits, by a line through the last two points.

    Args:
        points: Bytes that are needed at some batches.
        room: Bytes of each GPU.
        step: What the batches are multiples of.

    Example:
        >>> largest({64: 164, 128: 228}, {"small": 231, "large": 400})
        {'small': 128, 'large': 296}
    """
    (one, fewer), (two, more) = sorted(points.items())[-2:]
    slope = (more - fewer) / (two - one)
    return {
        part: max(0, int(two + (memory - more) / slope) // step * step)
        for part, memory in room.items()
    }


def _place(name: str) -> int:
    """Sorts rows in the order of the default strategies, other rows after them."""
    return STRATEGIES.index(name) if name in STRATEGIES else len(STRATEGIES)


def _write(out: Path, model: str, room: dict[str, int], rows: list[dict[str, Any]]) -> str:
    content = describe_environment() | {"model": model, "usable_bytes": room, "rows": rows}
    write_json(out / "fits.json", content)
    table = [["strategy", *room]]
    for row in rows:
        table.append([row["row"], *(str(row["largest_batch"][part]) for part in room)])
    title = f"{model}, 224px, bfloat16, whole SGD step: largest batch (multiples of {STEP}):"
    return write_table(out / "fits.md", title, table, content["command"])


if __name__ == "__main__":
    typer.run(main)
