"""The figure of a comparison: loss curves and memory bars."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from experiments.common.palette import COLORS
from experiments.comparison.rows import Row

SMOOTHING = 0.1  # weight of the newest step in the moving average of the loss


def draw(rows: Sequence[Row], path: Path) -> None:
    """Writes the figure of at most seven strategies as a PNG and creates its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(12, 3 + 0.4 * len(rows)), layout="constrained")
        left, right = figure.subplots(1, 2)
        _loss_curves(left, rows)
        _memory_bars(right, rows)
        figure.savefig(path, dpi=150)


def _loss_curves(axes: Axes, rows: Sequence[Row]) -> None:
    for row, color in zip(rows, COLORS, strict=False):
        label = row.strategy
        if row.accuracy() is not None:
            label += f": {np.mean(row.test_accuracy):.1%}"
        steps = np.arange(1, len(row.loss) + 1)
        axes.plot(steps, _smooth(row.loss), color=color, label=label)
    axes.set(title="Training loss (moving average)", xlabel="step", ylabel="cross-entropy")
    axes.grid(alpha=0.25)
    with_accuracy = rows[0].accuracy() is not None
    axes.legend(title="strategy: test accuracy" if with_accuracy else None, frameon=False)


def _smooth(values: Sequence[float]) -> list[float]:
    """Bias-corrected exponential moving average."""
    smooth, average = [], 0.0
    for i, value in enumerate(values, start=1):
        average += SMOOTHING * (value - average)
        smooth.append(average / (1 - (1 - SMOOTHING) ** i))
    return smooth


def _memory_bars(axes: Axes, rows: Sequence[Row]) -> None:
    positions = np.arange(len(rows))
    colors = COLORS[: len(rows)]
    declared = [row.measurement.declared_residual_bytes / 2**20 for row in rows]
    compiled = [(row.measurement.temp_bytes or np.nan) / 2**20 for row in rows]
    for values, offset, style in (
        (declared, -0.19, {"color": colors}),
        (compiled, 0.19, {"color": "white", "edgecolor": colors, "hatch": "////"}),
    ):
        bars = axes.barh(positions + offset, values, height=0.34, **style)
        axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.set(title="Memory of one training step", xlabel="MiB")
    axes.set_yticks(positions, [row.strategy for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    grey = "#666666"
    axes.legend(
        handles=[
            Patch(color=grey, label="declared residuals"),
            Patch(facecolor="white", edgecolor=grey, hatch="////", label="compiled: XLA temp"),
        ],
        frameon=False,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.12),
        ncols=2,
    )
