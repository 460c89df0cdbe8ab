"""Draws timelines as one self-contained HTML page."""

import html
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxcomp.memory._buffer import Buffer
from jaxcomp.memory._live_bytes import Timeline, short_source

# The colors are Paul Tol's "bright" and "muted" sets, which are safe for color-blind readers.
PHASES = {
    "argument": ("arguments", "#bbbbbb"),
    "other": ("outside the gradient", "#aa3377"),
    "forward": ("forward pass", "#4477aa"),
    "recomputed": ("recomputed", "#ccbb44"),
    "backward": ("backward pass", "#ee6677"),
}
_MODULE_COLORS = (
    "#332288", "#88ccee", "#44aa99", "#117733", "#999933", "#ddcc77", "#cc6677", "#882255",
    "#aa4499",
)  # fmt: skip
_ARGUMENTS, _NO_MODULE, _OTHER_MODULES = "arguments", "no module", "other modules"
_GREYS = {_ARGUMENTS: "#bbbbbb", _OTHER_MODULES: "#999999", _NO_MODULE: "#777777"}


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

    The page has one chart for each timeline, all at the same scale of bytes, colored by pass or by
    module. Pointing at a chart lists the largest buffers alive at that point, with their shape,
    pass and source line. A table lists the buffers alive at the peak, or at the point that is
    clicked; a click on a buffer shows its life. Below, the first chart and another one are compared
    at their peaks. Dragging zooms. The page loads no other file.

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


def bytes_by_phase(timeline: Timeline) -> dict[str, list[int]]:
    """Returns the live bytes at each point, by the phase in which the buffers were computed."""
    by_phase = _bytes_by(timeline, lambda buffer: buffer.origin.phase)
    return {phase: by_phase[phase] for phase in PHASES if phase in by_phase}


def bytes_by_module(timeline: Timeline) -> dict[str, list[int]]:
    """Returns the live bytes at each point, by the module of the model that computed the buffers.

    The modules are the children of the children of the outermost module. If they are many, only the
    largest child is divided. Repeated blocks are one module, with `*` for the number. Beyond nine
    modules, the smaller ones are summed.
    """
    scopes = {b.origin.scope for b in timeline.buffers if b.origin.phase != "argument"}
    levels = {scope: _levels(scope) for scope in scopes}
    inner = {tuple(path) for path in levels.values() if path}
    root = len(inner) > 1 and len({path[0] for path in inner}) == 1
    names = {scope: "/".join(path[root:][:2]) for scope, path in levels.items()}
    if len(set(names.values())) > len(_MODULE_COLORS):
        children = {scope: "/".join(path[root:][:1]) for scope, path in levels.items()}
        sizes: Counter[str] = Counter()
        for buffer in timeline.alive(timeline.peak_point):
            sizes[children.get(buffer.origin.scope, "")] += buffer.bytes
        del sizes[""]
        largest = max(sizes, key=sizes.__getitem__, default="")
        names = {s: names[s] if child == largest else child for s, child in children.items()}

    def module_of(buffer: Buffer) -> str:
        if buffer.origin.phase == "argument":
            return _ARGUMENTS
        return names[buffer.origin.scope] or _NO_MODULE

    found = _bytes_by(timeline, module_of)
    most = Counter({name: max(values) for name, values in found.items() if name not in _GREYS})
    kept = {name for name, _ in most.most_common(len(_MODULE_COLORS))}
    merged: dict[str, list[int]] = {}
    for name, values in found.items():
        name = name if name in kept or name in _GREYS else _OTHER_MODULES
        so_far = merged.get(name, [0] * len(values))
        merged[name] = [a + b for a, b in zip(so_far, values, strict=True)]
    return dict(sorted(merged.items(), key=lambda item: (item[0] not in _GREYS, item[0])))


def _levels(scope: str) -> list[str]:
    """Returns the modules of a scope, repeated blocks as one module with `*` for the number.

    Example:
        >>> _levels("blocks/3/up"), _levels("")
        (['blocks/*', 'up'], [])
    """
    found: list[str] = []
    for name in filter(None, scope.split("/")):
        if name.isdecimal() and found:
            found[-1] += "/*"
        else:
            found.append(name)
    return found


def _bytes_by(timeline: Timeline, key: Callable[[Buffer], str]) -> dict[str, list[int]]:
    """Returns the live bytes at each point by a key.

    Of the buffers in one place only the newest counts.
    """
    count = len(timeline.points)
    changes: dict[int, list[Buffer]] = defaultdict(list)
    for buffer in timeline.buffers:
        changes[buffer.start].append(buffer)
        changes[buffer.end + 1].append(buffer)
    in_place: dict[tuple[int, int], list[Buffer]] = defaultdict(list)
    now: Counter[str] = Counter()
    totals: dict[str, list[int]] = defaultdict(lambda: [0] * count)
    for point in range(count):
        for buffer in changes[point]:
            alive = in_place[buffer.allocation, buffer.offset]
            if alive:
                now[key(alive[-1])] -= alive[-1].bytes
            if buffer.start == point:
                alive.append(buffer)
            else:
                alive.remove(buffer)
            if alive:
                now[key(alive[-1])] += alive[-1].bytes
        for name, total in now.items():
            if total:
                totals[name][point] = total
    return dict(totals)


def _page_data(title: str, timeline: Timeline, texts: dict[str, int]) -> dict[str, Any]:
    """Returns the data of one chart, by the names that the script of the page reads.

    Args:
        title: the title of the chart.
        timeline: the timeline.
        texts: the position of each text in the list of texts of the page; extended in place.
    """

    def column(text_of: Callable[[Buffer], str]) -> list[int]:
        return [texts.setdefault(text_of(b), len(texts)) for b in timeline.buffers]

    by_module = bytes_by_module(timeline)
    named = [name for name in by_module if name not in _GREYS]
    module_color = _GREYS | dict(zip(named, _MODULE_COLORS, strict=False))
    return {
        "title": title,
        "points": timeline.points,
        "live": timeline.live_bytes,
        "byPhase": [
            {"label": PHASES[phase][0], "color": PHASES[phase][1], "values": values}
            for phase, values in bytes_by_phase(timeline).items()
        ],
        "byModule": [
            {"label": name, "color": module_color[name], "values": values}
            for name, values in by_module.items()
        ],
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
            "source": column(lambda b: short_source(b.origin.source)),
        },
    }
