r"""Compares the memory of a model's training step by several strategies.

    python -m experiments.bench.memory --target h100 --out experiments/results/resnet50-h100
    python -m experiments.bench.memory --target h100 --model resmlp_s24 \
        --strategy plain --strategy pruning --out experiments/results/resmlp_s24-h100

The steps are compiled ahead of time; nothing is run. The command `jaxcomp memory` does the same for
a step of your own.
"""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from experiments.common.options import (
    Add,
    Batch,
    Dtype,
    Image,
    Model,
    Out,
    Strategies,
    Target,
    usage_errors,
)
from experiments.common.record import describe_environment, read_table, write_json
from experiments.training.config import DTYPES
from jaxcomp import planning
from jaxcomp.memory import MemoryReport
from jaxcomp.models import steps
from jaxcomp.planning import MakeStep, Row

STRATEGIES = (
    "plain",
    "remat",
    "remat:dots",
    "accumulate:4",
    "offload",
    "pooling:window=2",
    "quantize:bits=4",
    "quantize:bits=2",
    "fused:bits=4",
    "fused:bits=3",
    "fused:bits=2",
    "offload:fused:bits=2",
)


def tabulate(
    make_step: MakeStep,
    strategies: list[str],
    model: str,
    batch: int,
    target: str | None,
    out: Path,
    max_batch: bool = False,
    add: bool = False,
) -> None:
    """Compiles each strategy and prints the table; writes memory.json and memory.md by row."""
    console = Console()
    described: dict[str, object] = {"model": model, "batch": batch}
    named = described | ({} if target is None else {"target": target})
    kept = _rows(out / "memory.json", named) if add else []
    kept = [row for row in kept if row.name not in strategies]

    def save(table: planning.Comparison) -> str:
        table = dataclasses.replace(table, rows=(*kept, *table.rows))
        content = describe_environment() | described | table.to_dict()
        write_json(out / "memory.json", content)
        text = f"{model}, batch {batch}:\n\n{table}\n\n    {content['command']}\n"
        (out / "memory.md").write_text(text)
        return text

    table = planning.compare(
        make_step,
        strategies,
        batch=batch,
        target=target,
        largest_batch=max_batch,
        progress=lambda name: console.status(f"compiling {name}"),
        save=save,
    )
    console.print(save(table), highlight=False, soft_wrap=True)


def _rows(path: Path, described: dict[str, object]) -> list[Row]:
    """Reads the rows of an earlier table of the same step."""
    rows = []
    own, report = ({f.name for f in dataclasses.fields(kind)} for kind in (Row, MemoryReport))
    for figures in read_table(path, described)["rows"]:
        if not figures["error"] and not report <= figures.keys():
            raise typer.BadParameter(f"add: {path} lacks {sorted(report - figures.keys())}")
        known = None if figures["error"] else {k: v for k, v in figures.items() if k in report}
        rest = {k: v for k, v in figures.items() if k in own}
        rows.append(Row(figures["row"], report=MemoryReport(**known) if known else None, **rest))
    return rows


@usage_errors()
def main(
    out: Out,
    strategy: Strategies = None,
    model: Model = "resnet50",
    batch: Batch = 128,
    image: Image = 224,
    dtype: Dtype = "bfloat16",
    target: Target = None,
    max_batch: Annotated[
        bool, typer.Option("--max-batch", help="Also find the largest batch that fits.")
    ] = False,
    add: Add = False,
) -> None:
    """Compile a training step by several strategies; write memory.json and memory.md."""
    make_step = steps.classifier(model, image, DTYPES[dtype])
    described = f"{model}, {image}px, {dtype}, whole SGD step"
    tabulate(make_step, strategy or list(STRATEGIES), described, batch, target, out, max_batch, add)


if __name__ == "__main__":
    typer.run(main)
