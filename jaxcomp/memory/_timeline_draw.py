"""Draws timelines as one self-contained HTML page."""

import html
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from ._live_bytes import Timeline

PHASES = {
    "argument": ("arguments", "#a9b1bd"),
    "other": ("outside the gradient", "#7c6fb0"),
    "forward": ("forward pass", "#2f6fde"),
    "recomputed": ("recomputed", "#eda12f"),
    "backward": ("backward pass", "#d9475b"),
}


def draw_html(path: str | Path, timelines: Mapping[str, Timeline]) -> None:
    """Draws timelines as one HTML page.

    The page has one chart for each timeline, all at the same scale. Pointing at a chart lists the
    largest buffers alive at that point. A table lists the buffers that are alive at each peak. The
    page loads no other file.

    Args:
        path: the file to write. An existing file is overwritten.
        timelines: the timelines by title, from top to bottom.

    Raises:
        ValueError: if `timelines` is empty.
        OSError: if `path` cannot be written.

    Example:
        >>> import pathlib, tempfile
        >>> import jax, jax.numpy as jnp
        >>> from jaxcomp import memory
        >>> x = jax.ShapeDtypeStruct((1024,), jnp.float32)
        >>> live = memory.timeline(jnp.sin, x, target="cpu")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     page = pathlib.Path(folder) / "timeline.html"
        ...     memory.draw_html(page, {"sin": live})
        ...     page.read_text().splitlines()[0]
        '<!doctype html>'
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
    """Live bytes at each point, by the phase in which the buffers were computed."""
    totals = {phase: [0] * len(timeline.points) for phase in PHASES}
    for point in range(len(timeline.points)):
        for buffer in timeline.alive(point):
            totals[buffer.origin.phase][point] += buffer.bytes
    return totals


def _page_data(title: str, timeline: Timeline) -> dict[str, Any]:
    """The data of one chart, by the names that the script of the page reads."""
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
