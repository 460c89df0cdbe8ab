"""Draws timelines as one self-contained HTML page."""

import html
import json
from collections.abc import Callable, Mapping
from importlib import resources
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxcomp.memory._areas import KINDS, PHASES, areas, kind
from jaxcomp.memory._buffer import Buffer
from jaxcomp.memory._live_bytes import Timeline, short_source
from jaxcomp.memory._report import format_seconds


def draw_html(
    path: str | Path,
    timelines: Mapping[str, Timeline],
    *,
    limit: int | None = None,
    title: str = "Live bytes",
    subtitle: str = "",
    details: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Draws timelines as one HTML page.

    A table has the bytes at each peak: parameters, optimizer, saved, temporary. The page has one
    chart for each timeline, all at the same scale of bytes, colored by pass, kind, module or
    largest buffer. Its axis is the estimated time in per cent, or the number of instructions where
    no time is known. Pointing at a chart lists the largest buffers alive at that point, with their
    shape, pass and source line. A table, which can be sorted and saved as CSV, lists the buffers
    alive at the peak, or at the point that is clicked; a click on a buffer shows its life. Below,
    the first chart and another one are compared at their peaks. Dragging zooms. The page loads no
    other file.

    Args:
        path: the file to write. An existing file is overwritten.
        timelines: the timelines by title, from top to bottom.
        limit: the bytes that the program may use, drawn as a line. `None` draws no line. A limit
            above 1.6 times the highest peak is not drawn.
        title: the heading of the page.
        subtitle: a line below the heading.
        details: text for the heading of a chart, by the title of its timeline.

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
    texts: dict[str, int] = {}
    data = {
        "phases": {key: {"label": label, "color": color} for key, (label, color) in PHASES.items()},
        "kinds": {key: {"label": label, "color": color} for key, (label, color) in KINDS.items()},
        "limit": limit,
        "timelines": [
            _page_data(name, timeline, texts) | {"detail": details.get(name, "")}
            for name, timeline in timelines.items()
        ],
        "texts": list(texts),
    }
    template = resources.files(__package__).joinpath("timeline.html").read_text("utf-8")
    encoded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    page = template.replace("{{title}}", html.escape(title))
    page = page.replace("{{subtitle}}", html.escape(subtitle)).replace("{{data}}", encoded)
    Path(path).write_text(page, encoding="utf-8")


def _page_data(title: str, timeline: Timeline, texts: dict[str, int]) -> dict[str, Any]:
    """Returns the data of one chart, by the names that the script of the page reads.

    Args:
        title: the title of the chart.
        timeline: the timeline.
        texts: the position of each text in the list of texts of the page; extended in place.
    """

    def column(text_of: Callable[[Buffer], str]) -> list[int]:
        return [texts.setdefault(text_of(b), len(texts)) for b in timeline.buffers]

    return {
        "title": title,
        "points": timeline.points,
        "live": timeline.live_bytes,
        "ends": _ends(timeline),
        "time": format_seconds(sum(timeline.seconds)) if timeline.seconds else None,
        **areas(timeline),
        "peak": timeline.peak_bytes,
        "peakPoint": timeline.peak_point,
        "backwardStart": timeline.backward_start,
        "buffers": {
            "bytes": [b.bytes for b in timeline.buffers],
            "start": [b.start for b in timeline.buffers],
            "end": [b.end for b in timeline.buffers],
            "read": [max(b.reads, default=None) for b in timeline.buffers],
            "place": [f"{b.allocation}:{b.offset}" for b in timeline.buffers],
            "label": column(Buffer.label),
            "group": column(Buffer.group_label),
            "shape": column(lambda b: b.shape),
            "phase": column(lambda b: b.origin.phase),
            "kind": column(lambda b: kind(timeline, b)),
            "source": column(lambda b: short_source(b.origin.source)),
        },
    }


def _ends(timeline: Timeline) -> list[float]:
    """Returns where each instruction ends on the axis of a chart, from 0 to 1.

    The axis is the estimated time, or the number of instructions where no time is known.
    """
    ends = list(accumulate(timeline.seconds or ()))
    if not ends or not ends[-1]:
        ends = list(range(1, len(timeline.points) + 1))
    return [round(end / ends[-1], 7) for end in ends]
