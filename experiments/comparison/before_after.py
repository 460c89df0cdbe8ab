"""The memory of a stock training step, before and after `jaxcomp.compress`, as a figure."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import matplotlib as mpl
import numpy as np
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.common.palette import COLORS
from jaxcomp.memory import Timeline
from jaxcomp.planning import MakeStep, compare

STRATEGIES = {"plain": "as it is", "automatic": "after jaxcomp.compress(model)"}
FORWARD, BACKWARD, LIMIT = COLORS[5], COLORS[1], COLORS[4]
GIB = 2**30


def compile_both(make_step: MakeStep, batch: int, target: str) -> dict[str, Timeline]:
    """The timelines of the plain step and of that with the default policy; nothing is run.

    Raises:
        RuntimeError: If one of them does not compile.
    """

    def progress(name: str) -> AbstractContextManager[None]:
        typer.echo(f"compiling {name} for {target}")
        return nullcontext()

    rows = compare(
        make_step,
        [*STRATEGIES],
        batch=batch,
        target=target,
        timelines=True,
        xla_remat=False,
        progress=progress,
    ).rows
    timelines = {}
    for row in rows:
        if row.timeline is None:
            raise RuntimeError(f"{row.name}: {row.error}")
        timelines[row.name] = row.timeline
    return timelines


def sentence(title: str, device: str, timelines: dict[str, Timeline]) -> str:
    """What the figure shows."""
    plain, coded = (timelines[name].peak_bytes for name in STRATEGIES)
    return (
        f"{title} needs {plain / GIB:.1f} GiB, and {coded / GIB:.1f} GiB after "
        f"jaxcomp.compress(model): {plain / coded:.1f} times less (compiled for {device}; no GPU "
        "was used)."
    )


def draw(path: Path, title: str, timelines: dict[str, Timeline], capacity: tuple[str, int]) -> None:
    """Writes the timelines side by side, on one scale, with the bytes of the device as a line."""
    with mpl.rc_context({"font.size": 12, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(11, 4.6), layout="constrained")
        figure.suptitle(title)
        both = figure.subplots(1, 2, sharey=True)
        for axes, (name, words) in zip(both, STRATEGIES.items(), strict=True):
            _timeline(axes, timelines[name], words)
            axes.axhline(capacity[1] / GIB, color=LIMIT, linestyle="--")
        both[0].set_ylabel("live bytes, GiB")
        both[0].set_ylim(0, 1.1 * max(capacity[1], timelines["plain"].peak_bytes) / GIB)
        both[0].annotate(
            capacity[0], (0, capacity[1] / GIB), (4, 5), textcoords="offset points",
            color=LIMIT,
        )  # fmt: skip
        both[1].legend(frameon=False, loc="center right")
        figure.savefig(path, dpi=150)


def _timeline(axes: Axes, live: Timeline, words: str) -> None:
    values = np.asarray(live.live_bytes) / GIB
    points = np.linspace(0, 100, len(values))
    start = len(values) if live.backward_start is None else live.backward_start
    for part, color, label in (
        (slice(0, start + 1), FORWARD, "forward pass"),
        (slice(start, None), BACKWARD, "backward pass, optimizer"),
    ):
        axes.fill_between(points[part], values[part], color=color, linewidth=0, label=label)
    axes.set(
        title=f"{words}: {live.peak_bytes / GIB:.1f} GiB", xlabel="instructions of the step, %"
    )
    axes.set_xlim(0, 100)
