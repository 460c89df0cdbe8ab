"""The bytes of a timeline as areas of a chart: by pass, by kind, by module and by buffer."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

from jaxcomp.memory._buffer import Buffer, group
from jaxcomp.memory._live_bytes import Timeline

# The colors are Paul Tol's "bright" and "muted" sets, which are safe for color-blind readers.
PHASES = {
    "argument": ("arguments", "#bbbbbb"),
    "other": ("outside the gradient", "#aa3377"),
    "forward": ("forward pass", "#4477aa"),
    "recomputed": ("recomputed", "#ccbb44"),
    "backward": ("backward pass", "#ee6677"),
}
KINDS = {
    "parameters": ("parameters", "#4477aa"),
    "optimizer": ("optimizer", "#66ccee"),
    "other": ("other arguments", "#bbbbbb"),
    "saved": ("saved for the backward pass", "#228833"),
    "temporary": ("temporary, and outputs", "#ccbb44"),
}
_COLORS = (
    "#332288", "#88ccee", "#44aa99", "#117733", "#999933", "#ddcc77", "#cc6677", "#882255",
    "#aa4499",
)  # fmt: skip
_ARGUMENTS, _NO_MODULE, _OTHER_MODULES = "arguments", "no module", "other modules"
_OTHER_BUFFERS = "other buffers"
_GREYS = {
    _ARGUMENTS: "#bbbbbb",
    _OTHER_MODULES: "#999999",
    _NO_MODULE: "#777777",
    _OTHER_BUFFERS: "#bbbbbb",
}
_OPTIMIZER = re.compile(r"opt_state|optimizer")
_PARAMETER = re.compile(r"param|weight|/")  # a slash: of a Flax NNX object


def kind(timeline: Timeline, buffer: Buffer) -> str:
    """Returns which of `KINDS` a buffer is of. That of an argument is told by its name."""
    start = timeline.backward_start
    if buffer.origin.phase == "argument":
        if _OPTIMIZER.search(buffer.origin.scope):
            return "optimizer"
        return "parameters" if _PARAMETER.search(buffer.origin.scope) else "other"
    waits = start is not None and buffer.start < start <= max(buffer.reads, default=-1)
    return "saved" if waits and buffer.origin.phase != "backward" else "temporary"


def areas(timeline: Timeline) -> dict[str, list[dict[str, object]]]:
    """Returns the areas of a chart by the names of its colorings."""

    def area(label: str, color: str, values: list[int]) -> dict[str, object]:
        return {"label": label, "color": color, "values": values}

    def named(found: Mapping[str, list[int]]) -> list[dict[str, object]]:
        colors = iter(_COLORS)
        return [area(n, _GREYS[n] if n in _GREYS else next(colors), v) for n, v in found.items()]

    return {
        "byPhase": [area(*PHASES[p], values) for p, values in bytes_by_phase(timeline).items()],
        "byKind": [area(*KINDS[k], values) for k, values in bytes_by_kind(timeline).items()],
        "byModule": named(bytes_by_module(timeline)),
        "byBuffer": named(bytes_by_buffer(timeline)),
    }


def bytes_by_phase(timeline: Timeline) -> dict[str, list[int]]:
    """Returns the live bytes at each point, by the phase in which the buffers were computed."""
    by_phase = _bytes_by(timeline, lambda buffer: buffer.origin.phase)
    return {phase: by_phase[phase] for phase in PHASES if phase in by_phase}


def bytes_by_kind(timeline: Timeline) -> dict[str, list[int]]:
    """Returns the live bytes at each point, by `KINDS`."""
    by_kind = _bytes_by(timeline, lambda buffer: kind(timeline, buffer))
    return {name: by_kind[name] for name in KINDS if name in by_kind}


def bytes_by_buffer(timeline: Timeline) -> dict[str, list[int]]:
    """Returns the live bytes at each point of the nine largest buffers at the peak, and of others.

    Buffers that differ only in the index of their layer are one.
    """
    largest = group(timeline.alive(timeline.peak_point))[: len(_COLORS)]
    names = {id(b): f"{g.label()} {b.shape}" for g in largest for b in g.buffers}
    found = _bytes_by(timeline, lambda buffer: names.get(id(buffer), _OTHER_BUFFERS))
    return {
        name: found[name]
        for name in (_OTHER_BUFFERS, *dict.fromkeys(names.values()))
        if name in found
    }


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
    if len(set(names.values())) > len(_COLORS):
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
    kept = {name for name, _ in most.most_common(len(_COLORS))}
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
