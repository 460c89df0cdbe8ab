"""The picture of a plan: bytes against estimated time of all that was compiled."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from jaxcomp.planning._compiled import Compiled

_EXACT, _CODED = "#0072B2", "#D55E00"  # of Okabe and Ito, safe for colour-blind eyes
_GIB = 2**30


def draw(
    file: str | Path, title: str, frontier: Sequence[Compiled], chosen: str, budget_bytes: int
) -> None:
    """Writes the picture; its format is that of the file's suffix.

    Args:
        file: The picture.
        title: Its title.
        frontier: What was compiled.
        chosen: The name of the one that is marked.
        budget_bytes: The budget.
    """
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()

    def places(points: Sequence[Compiled]) -> tuple[list[float], list[float]]:
        return [p.total_bytes / _GIB for p in points], [p.milliseconds for p in points]

    for is_exact, color, label in ((True, _EXACT, "exact"), (False, _CODED, "quantized")):
        points = [p for p in frontier if p.is_exact == is_exact]
        axes.scatter(*places(points), color=color, label=label, zorder=3)
    marked = [p for p in frontier if p.name == chosen]
    axes.scatter(*places(marked), s=160, facecolors="none", edgecolors="black", label="chosen")
    for near in _neighbours(frontier):
        point = near[0]
        axes.annotate(
            "\n".join(p.name for p in near),
            (point.total_bytes / _GIB, point.milliseconds),
            xytext=(6, 6),
            textcoords="offset points",
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8},
        )
    axes.axvline(budget_bytes / _GIB, color="black", linestyle="--", label="budget")
    axes.set(title=title, xlabel="memory that XLA needs, GiB", ylabel="estimated step time, ms")
    axes.margins(0.12)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)


def _neighbours(frontier: Sequence[Compiled]) -> list[list[Compiled]]:
    """Returns the points in groups whose labels would overlap."""
    times = [p.milliseconds for p in frontier]
    sizes = [p.total_bytes for p in frontier]
    height, width = (max(values) - min(values) for values in (times, sizes))
    groups: list[list[Compiled]] = []
    for point in sorted(frontier, key=lambda p: -p.milliseconds):
        for group in groups:
            first = group[0]
            if (
                first.milliseconds - point.milliseconds <= 0.05 * height
                and abs(first.total_bytes - point.total_bytes) <= 0.15 * width
            ):
                group.append(point)
                break
        else:
            groups.append([point])
    return groups
