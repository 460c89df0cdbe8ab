"""Draws timelines one above the other: a PNG by matplotlib, or one self-contained HTML page."""

import html
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from .live_bytes import Timeline, format_bytes

PHASES = {
    "argument": ("arguments", "#a9b1bd"),
    "other": ("outside of the gradient", "#7c6fb0"),
    "forward": ("of the forward pass", "#2f6fde"),
    "recomputed": ("recomputed", "#eda12f"),
    "backward": ("of the backward pass", "#d9475b"),
}


def draw_png(path: str | Path, timelines: Mapping[str, Timeline]) -> None:
    """Draws timelines one above the other, at one scale, into a PNG file.

    Areas are coloured by the pass that made the bytes; the peak is marked, and the largest
    buffers alive at it are named.

    Args:
        path: the file to write.
        timelines: title and timeline of each panel, from the top.

    Raises:
        ImportError: if matplotlib is not installed (extra `jaxcomp[train]`).
        ValueError: if `timelines` is empty.
        OSError: if `path` cannot be written.
    """
    _check(timelines)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing a PNG needs matplotlib: install jaxcomp[train]") from error

    figure = Figure(figsize=(11, 0.6 + 3.3 * len(timelines)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(timelines), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    highest = max(t.peak_bytes for t in timelines.values())
    scale, unit = _unit(highest)
    for axes, (title, timeline) in zip(panels, timelines.items(), strict=True):
        _draw_panel(axes, timeline, scale)
        axes.set_title(title.replace("$", r"\$"), loc="left", fontsize=11, fontweight="bold")
        axes.set_ylabel(unit)
        axes.set_ylim(0, 1.08 * highest / scale)
    panels[-1].set_xlabel("program order (instruction; a loop's body appears once)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside upper right", ncols=len(PHASES), frameon=False, fontsize=8
    )
    with open(path, "wb") as file:
        figure.savefig(file, format="png")


def draw_html(path: str | Path, timelines: Mapping[str, Timeline]) -> None:
    """Writes timelines one above the other, at one scale, as one HTML page without dependencies.

    Pointing at a chart lists the largest buffers alive there; below each chart is the table of
    the buffers at its peak.

    Args:
        path: the file to write.
        timelines: title and timeline of each panel, from the top.

    Raises:
        ValueError: if `timelines` is empty.
        OSError: if `path` cannot be written.
    """
    _check(timelines)
    data = {
        "phases": {key: {"label": label, "color": color} for key, (label, color) in PHASES.items()},
        "timelines": [_page_data(title, timeline) for title, timeline in timelines.items()],
    }
    template = resources.files(__package__).joinpath("timeline.html").read_text("utf-8")
    title = html.escape(" / ".join(timelines))
    encoded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    page = template.replace("{{title}}", title).replace("{{data}}", encoded)
    Path(path).write_text(page, encoding="utf-8")


def _check(timelines: Mapping[str, Timeline]) -> None:
    if not timelines:
        raise ValueError("timelines: expected at least one, got none")


def _unit(peak: int) -> tuple[float, str]:
    """Bytes per unit of the y axis, and the unit's name."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if peak >= 1024**power:
            return float(1024**power), unit
    return 1.0, "B"


def bytes_by_phase(timeline: Timeline) -> dict[str, list[int]]:
    """Live bytes at each point, by the pass that made them."""
    totals = {phase: [0] * len(timeline.points) for phase in PHASES}
    for point in range(len(timeline.points)):
        for buffer in timeline.alive(point):
            totals[buffer.origin.phase][point] += buffer.bytes
    return totals


def _draw_panel(axes: Any, timeline: Timeline, scale: float) -> None:
    points = range(len(timeline.points))
    totals = bytes_by_phase(timeline)
    axes.stackplot(
        points,
        [[value / scale for value in totals[phase]] for phase in PHASES],
        labels=[label for label, _ in PHASES.values()],
        colors=[color for _, color in PHASES.values()],
        step="post",
        linewidth=0,
        alpha=0.9,
    )
    peak, at = timeline.peak_bytes / scale, timeline.peak_point
    axes.plot(at, peak, "o", color="black", markersize=4, zorder=5)
    largest = [b for b in timeline.alive(at) if b.origin.phase != "argument"][:4]
    lines = [f"peak {format_bytes(timeline.peak_bytes)}"]
    lines += [f"{format_bytes(b.bytes)}  {_shorten(b.label())}" for b in largest]
    axes.text(
        0.995,
        0.97,
        "\n".join(lines),
        transform=axes.transAxes,
        ha="right",
        va="top",
        multialignment="left",
        fontsize=7.5,
        linespacing=1.4,
        bbox={"boxstyle": "round,pad=0.4", "facecolor": "white", "edgecolor": "0.8", "alpha": 0.88},
    )
    if timeline.backward_start is not None:
        axes.axvline(timeline.backward_start, color="black", linewidth=0.8, linestyle=(0, (4, 3)))
        axes.annotate(
            " backward",
            (timeline.backward_start, 1),
            xycoords=("data", "axes fraction"),
            va="top",
            fontsize=8,
        )
    axes.margins(x=0)
    axes.spines[["top", "right"]].set_visible(False)


def _shorten(label: str, length: int = 60) -> str:
    return label if len(label) <= length else "…" + label[1 - length :]


def _page_data(title: str, timeline: Timeline) -> dict[str, Any]:
    return {
        "title": title,
        "points": timeline.points,
        "live": timeline.live_bytes,
        "byPhase": bytes_by_phase(timeline),
        "peak": timeline.peak_bytes,
        "peakPoint": timeline.peak_point,
        "backwardStart": timeline.backward_start,
        "buffers": [
            {
                "bytes": b.bytes,
                "label": b.label(),
                "shape": b.shape,
                "phase": b.origin.phase,
                "source": b.origin.source,
                "start": b.start,
                "end": b.end,
                "place": f"{b.allocation}:{b.offset}",
            }
            for b in timeline.buffers
        ],
    }
