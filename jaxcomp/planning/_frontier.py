"""The picture of a plan: bytes against estimated time of all that was compiled."""

from pathlib import Path

from matplotlib.figure import Figure

from jaxcomp.planning._fitted import FittedPlan

_EXACT, _CODED = "#0072B2", "#D55E00"  # of Okabe and Ito, safe for colour-blind eyes


def draw(plan: FittedPlan, file: str | Path) -> None:
    """Writes a picture of a plan's frontier; the format is that of the file's suffix."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for is_exact, color, label in ((True, _EXACT, "exact"), (False, _CODED, "quantized")):
        points = [c for c in plan.frontier if c.is_exact == is_exact]
        sizes = [c.total_bytes / 2**30 for c in points]
        axes.scatter(sizes, [c.milliseconds for c in points], color=color, label=label, zorder=3)
    for point in plan.frontier:
        axes.annotate(
            point.name,
            (point.total_bytes / 2**30, point.milliseconds),
            xytext=(5, 5),
            textcoords="offset points",
            fontsize=9,
        )
    axes.scatter(
        [plan.total_bytes / 2**30],
        [plan.milliseconds],
        s=160,
        facecolors="none",
        edgecolors="black",
        label="chosen",
        zorder=4,
    )
    axes.axvline(plan.budget_bytes / 2**30, color="black", linestyle="--", label="budget")
    axes.set(
        title=f"Training step on {plan.target}, batch {plan.batch}, as compiled",
        xlabel="memory that XLA needs, GiB",
        ylabel="estimated step time, ms",
    )
    axes.margins(0.12)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)
