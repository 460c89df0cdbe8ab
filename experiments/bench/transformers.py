r"""Compares the memory and HBM traffic of transformers' training steps by several strategies.

    python -m experiments.bench.transformers --target h100 \
        --out experiments/results/transformers-h100

Each case has a folder with memory.json, memory.md and frontier.png, which plots memory over HBM
traffic with the Pareto frontier.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib.figure import Figure

from experiments.bench.memory import tabulate
from experiments.common.options import Add, Out, Strategies, Target, usage_errors
from experiments.common.palette import style
from experiments.zoo import transformers
from jaxcomp.models import _lm
from jaxcomp.planning import MakeStep, Strategy

CASES: dict[str, tuple[MakeStep, int, str]] = {
    "lm": (_lm.lm, 8, "Language model, 6 x 768, 1024 tokens, bfloat16, AdamW step"),
    "scanned_lm": (
        _lm.scanned_lm,
        8,
        "Language model, 6 x 768 under scan, 1024 tokens, bfloat16, AdamW step",
    ),
    "long_lm": (
        transformers.long_lm,
        1,
        "Language model, 6 x 768, 8192 tokens, bfloat16, AdamW step",
    ),
    "vit_b16": (transformers.vit_b16, 128, "ViT-B/16, 224px, bfloat16, AdamW step"),
}
STRATEGIES = (
    "plain",
    "remat",
    "remat:dots",
    "offload",
    "boundary:quantize:bits=8",
    "boundary:quantize:bits=4",
    "quantize:bits=4",
    "transformer:bits=4",
    "transformer:bits=2",
)
SPLIT = ("accumulate:2", "accumulate:4", "accumulate:2:transformer:bits=4")


def draw(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Plots the total memory of the rows over their HBM traffic; the Pareto frontier is a line.

    Raises:
        ValueError: If plain is not among the rows, or has an error.
    """
    found = {row["row"]: row for row in rows if not row["error"] and row["hbm_traffic_bytes"]}
    if "plain" not in found:
        raise ValueError(f"rows={list(found)}: expected plain among them")
    plain = found["plain"]["hbm_traffic_bytes"]
    points = sorted(
        (row["hbm_traffic_bytes"] / plain, row["total_bytes"], name) for name, row in found.items()
    )
    figure = Figure(figsize=(10, 4.8), layout="constrained")
    axes = figure.subplots()
    best = [p for i, p in enumerate(points) if all(p[1] < other[1] for other in points[:i])]
    axes.step([p[0] for p in best], [p[1] / 2**20 for p in best], where="post", color="#999999")
    top = 1.1 * found["plain"]["total_bytes"] / 2**20
    for number, (traffic, total, name) in enumerate(points):
        strategy = Strategy.parse(name)
        encodes = strategy.policy is not None or strategy.block_codec is not None
        above = f" (above: {total / 2**20:.0f} MiB)" if total / 2**20 > top else ""
        color, marker = style(number)
        fill = color if encodes else "white"
        at = traffic, total / 2**20
        axes.scatter(*at, s=50, label=name + above, marker=marker, c=fill, edgecolors=color)
    axes.set(xlabel="HBM traffic / plain", ylabel="total memory, MiB", ylim=(0, top))
    axes.set_title(
        f"{title}\nfilled: with codes; line: the least memory at most that traffic",
        loc="left",
        fontsize=10,
    )
    figure.legend(loc="outside right center", frameon=False)
    axes.grid(alpha=0.25)
    figure.savefig(path, dpi=150)


@usage_errors()
def main(
    out: Out,
    case: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(CASES)}; repeatable. Default: all.")
    ] = None,
    strategy: Strategies = None,
    target: Target = None,
    add: Add = False,
) -> None:
    """Compile every case by every strategy; nothing is run."""
    unknown = set(case or ()) - set(CASES)
    if unknown:
        raise typer.BadParameter(f"case={sorted(unknown)}: expected of {list(CASES)}")
    for name in case or CASES:
        make_step, batch, title = CASES[name]
        strategies = strategy or [*STRATEGIES, *(SPLIT if batch > 1 else ())]
        folder = out / name
        tabulate(make_step, strategies, title, batch, target, folder, add=add)
        rows = json.loads((folder / "memory.json").read_text())["rows"]
        draw(rows, f"{title}, batch {batch}", folder / "frontier.png")


if __name__ == "__main__":
    typer.run(main)
