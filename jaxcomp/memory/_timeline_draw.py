"""Draws timelines one above the other, as one self-contained HTML page."""

import html
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from ._live_bytes import Timeline

PHASES = {
    "argument": ("arguments", "#a9b1bd"),
    "other": ("outside of the gradient", "#7c6fb0"),
    "forward": ("of the forward pass", "#2f6fde"),
    "recomputed": ("recomputed", "#eda12f"),
    "backward": ("of the backward pass", "#d9475b"),
}


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
    if not timelines:
        raise ValueError("timelines: expected at least one, got none")
    data = {
        "phases": {key: {"label": label, "color": color} for key, (label, color) in PHASES.items()},
        "timelines": [_page_data(title, timeline) for title, timeline in timelines.items()],
    }
    template = resources.files(__package__).joinpath("timeline.html").read_text("utf-8")
    title = html.escape(" / ".join(timelines))
    encoded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    page = template.replace("{{title}}", title).replace("{{data}}", encoded)
    Path(path).write_text(page, encoding="utf-8")


def bytes_by_phase(timeline: Timeline) -> dict[str, list[int]]:
    """Live bytes at each point, by the pass that made them."""
    totals = {phase: [0] * len(timeline.points) for phase in PHASES}
    for point in range(len(timeline.points)):
        for buffer in timeline.alive(point):
            totals[buffer.origin.phase][point] += buffer.bytes
    return totals


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
