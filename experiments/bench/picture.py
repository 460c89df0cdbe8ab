"""The picture of the documentation: memory against the estimated time of one training step.

It reads what `experiments.bench.memory` recorded; nothing is compiled.

    python -m experiments.bench.picture
"""

from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl
import typer
from matplotlib.figure import Figure

from experiments.common.labels import label
from experiments.tables.rows import load

RECORD = "resnet50-h100/memory.json"
OUT = Path("docs/resnet50.png")

# Okabe and Ito's palette, which colour-blind readers can tell apart, and a marker for each kind.
PLAIN = ("#000000", "s", "plain")
EXACT = ("#0072B2", "o", "exact")
QUANTIZE = ("#D55E00", "^", "quantized, op by op")
FUSED = ("#009E73", "D", "quantized, fused")

STRATEGIES = {
    "plain": PLAIN,
    "remat": EXACT,
    "remat:dots": EXACT,
    "accumulate:4": EXACT,
    "quantize:bits=4": QUANTIZE,
    "quantize:bits=2": QUANTIZE,
    "fused:bits=4": FUSED,
    "fused:bits=3": FUSED,
    "fused:bits=2": FUSED,
}


def draw(rows: dict[str, dict[str, Any]], path: Path) -> None:
    """Writes the picture of the rows by name as a PNG."""
    with mpl.rc_context({"font.size": 13, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(9, 5.6), layout="constrained")
        axes = figure.subplots()
        points = []
        for strategy, (color, marker, kind) in STRATEGIES.items():
            row = rows[strategy]
            time = row["estimated_seconds"] / rows["plain"]["estimated_seconds"]
            at = time, row["total_bytes"] / 2**30
            axes.plot(*at, marker, color=color, markersize=10, label=kind)
            points.append((strategy, at, color))
        axes.set(
            xlabel="estimated time of one step / plain",
            ylabel="device memory needed, GiB",
            xlim=(0.88, 1.45),
            ylim=(0, 6.9),
        )
        axes.set_title(
            "ResNet-50 training step, batch 128, 224 px, bfloat16\n"
            "compiled ahead of time for H100; no GPU was used",
            loc="left",
            fontsize=13,
        )
        axes.grid(alpha=0.25)
        handles, labels = axes.get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        axes.legend(
            unique.values(),
            unique.keys(),
            frameon=False,
            loc="upper left",
            ncols=2,
            columnspacing=1,
        )
        axes.annotate(
            "better",
            xy=(0.895, 1.9),
            xytext=(0.93, 3.0),
            color="#666666",
            ha="center",
            arrowprops={"arrowstyle": "->", "color": "#666666"},
        )
        label(axes, points)
        figure.savefig(path, dpi=150)


def main(
    record: Annotated[str, typer.Option(help="What experiments.bench.memory wrote.")] = RECORD,
    out: Annotated[Path, typer.Option(help="The PNG.")] = OUT,
) -> None:
    """Draws memory against estimated time of strategies for ResNet-50's training step."""
    rows = {row["row"]: row for row in load(record)["rows"]}
    draw(rows, out)


if __name__ == "__main__":
    typer.run(main)
