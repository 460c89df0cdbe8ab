"""Labels of points in a figure that do not overlap."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

_MARKER = 8  # half the side of the square that a marker takes, in pixels
# Where a label may be, the best place first: offset in points, horizontal alignment.
_PLACES = [
    (offset, side)
    for away in (1, 2, 3)
    for offset, side in (
        ((11, 0), "left"),
        ((-11, 0), "right"),
        ((0, 15 * away), "center"),
        ((0, -15 * away), "center"),
        ((11, 15 * away), "left"),
        ((-11, -15 * away), "right"),
    )
]


def label(axes: Axes, points: Sequence[tuple[str, tuple[float, float], str]]) -> list[Annotation]:
    """Writes names beside points, clear of each other and of all points.

    Call it when limits, title and ticks are set.

    Args:
        axes: Where the points are drawn.
        points: Name, position and color of each.

    Raises:
        ValueError: If there is no room for a name.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # the layout decides where the points are
    found = [axes.transData.transform(at) for _, at, _ in points]
    taken = [Bbox([point - _MARKER, point + _MARKER]) for point in found]
    labels = []
    for name, at, color in points:
        for offset, side in _PLACES:
            text = axes.annotate(
                name, at, offset, textcoords="offset points", ha=side, va="center", color=color
            )
            box = text.get_window_extent()
            inside = axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1
            if inside and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                labels.append(text)
                break
            text.remove()
        else:
            raise ValueError(f"{name!r}: expected room beside its point")
    return labels
