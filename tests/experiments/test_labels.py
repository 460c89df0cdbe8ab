import itertools

import pytest
from matplotlib.figure import Figure

from experiments.common.labels import label

POINTS = [(f"strategy:bits={i}", (1 + 0.01 * i, 2 - 0.02 * i), "black") for i in range(5)]


def axes():
    found = Figure(figsize=(6, 4), layout="constrained").subplots()
    found.set(xlim=(0, 2), ylim=(0, 4))
    return found


def test_names_of_close_points_do_not_overlap():
    drawn = axes()
    boxes = [text.get_window_extent() for text in label(drawn, POINTS)]
    assert not [pair for pair in itertools.combinations(boxes, 2) if pair[0].overlaps(pair[1])]
    assert all(drawn.bbox.x0 <= box.x0 and box.x1 <= drawn.bbox.x1 for box in boxes)


def test_no_room_is_an_error():
    with pytest.raises(ValueError, match="expected room beside its point"):
        label(axes(), [("strategy", (1.0, 2.0), "black")] * 30)
