import json

import pytest
import typer
from matplotlib.figure import Figure

from experiments.comparison import compare
from experiments.comparison.measure import Measurement
from experiments.comparison.rows import Row
from experiments.reproduce import block_sparse as module
from jaxcomp.planning import Strategy


def row(strategy, accuracy, temp_bytes):
    return Row(strategy, accuracy, [2.0, 1.0], Measurement(10, 4.0, "cpu", temp_bytes, 0.1, 1.5))


def test_strategies_are_known():
    assert len(set(module.STRATEGIES)) == len(module.STRATEGIES)
    assert all(Strategy.parse(name).spec == name for name in module.STRATEGIES)


def test_table_and_plot_are_written(tmp_path, monkeypatch):
    rows = [row("plain", [0.5, 0.7], 2**20), row("pruning:density=0.1", [0.4, 0.4], None)]
    drawn = []
    monkeypatch.setattr(compare, "compare", lambda *given: rows)
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    module.main(tmp_path, strategy=["plain", "pruning:density=0.1"], seed=[0, 1], epochs=1)
    assert json.loads((tmp_path / "comparison.json").read_text())["seeds"] == [0, 1]
    memory, time = drawn[-1].axes
    (plain,) = time.containers[0].lines[0].get_xydata().tolist()
    assert plain == pytest.approx([1.5, 60])
    assert memory.containers[0].lines[0].get_xdata().tolist() == [1.0]
    (legend,) = drawn[-1].legends
    assert [text.get_text() for text in legend.get_texts()] == [r.strategy for r in rows]


def test_bad_input(tmp_path):
    with pytest.raises(typer.BadParameter, match="expected plain first, 2 or more seeds"):
        module.main(tmp_path, strategy=["remat"], seed=[0, 1])
    with pytest.raises(typer.BadParameter, match="expected plain first, 2 or more seeds"):
        module.main(tmp_path, seed=[0])
