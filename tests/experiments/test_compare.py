import dataclasses
import json
import math

import matplotlib.image
import pytest
from typer.testing import CliRunner

from experiments.comparison import compare as module
from experiments.comparison.compare import HEADER, compare, report
from experiments.comparison.measure import Measurement, measure
from experiments.comparison.rows import Row, mebibytes
from experiments.training.config import TrainConfig
from experiments.training.run import build
from experiments.training.train import TrainResult
from jaxcomp import memory

CONFIG = TrainConfig(model="tiny", dataset="tiny", epochs=1, epoch_steps=1, batch=16)
STRATEGIES = ["plain", "accumulate:2", "quantize:bits=2"]


def make_rows():
    cost = Measurement(2**20, 32.5, "cpu", 3 * 2**20, step_seconds=0.5, step_time_ratio=1.25)
    return [Row(strategy, [0.5, 0.75], [2.5, 1.5, 1.0], cost) for strategy in STRATEGIES]


def test_measure(tiny):
    result = measure(CONFIG, STRATEGIES, tiny, rounds=2)
    assert list(result) == STRATEGIES
    plain, accumulate, quantize = result.values()
    assert plain.step_time_ratio == 1
    assert all(m.step_seconds > 0 and m.temp_bytes > 0 for m in result.values())
    ratio = accumulate.declared_residual_bytes / plain.declared_residual_bytes
    assert ratio == pytest.approx(0.5, abs=0.02)
    assert quantize.declared_residual_bytes < 0.2 * plain.declared_residual_bytes

    batch = next(tiny.batches("train", 16, seed=0, epoch=0, augment=False, drop_remainder=True))
    run = build(CONFIG, tiny)
    residuals = memory.declared_residuals(run.train_step.trace(run.state, *batch).jaxpr)
    floats = [r for r in residuals if r.dtype == "float32"]
    elements = sum(math.prod(r.shape) for r in floats)
    masks = sum(r.nbytes for r in residuals) - 4 * elements
    assert plain.bits_per_element == pytest.approx(32 + 8 * masks / elements)
    expected = 8 * quantize.declared_residual_bytes / elements
    assert quantize.bits_per_element == pytest.approx(expected)


def test_measure_needs_plain_first(tiny):
    with pytest.raises(ValueError, match=r"strategies=\['remat', 'plain'\]: expected plain first"):
        measure(CONFIG, ["remat", "plain"], tiny, rounds=1)
    with pytest.raises(ValueError, match="rounds=0: expected 1 or more"):
        measure(CONFIG, ["plain"], tiny, rounds=0)


def test_compare_keeps_finished_runs(tiny, tmp_path, monkeypatch):
    strategies, seeds = ["plain", "quantize:bits=2"], [1]
    cost = dict.fromkeys(strategies, make_rows()[0].measurement)
    monkeypatch.setattr(module, "measure", lambda *arguments: cost)
    rows = compare(CONFIG, strategies, seeds, tmp_path)
    assert [row.strategy for row in rows] == strategies
    assert all(len(row.test_accuracy) == 1 and len(row.loss) == 1 for row in rows)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == [
        "plain-1",
        "quantize_bits=2-1",
    ]

    def fail(*arguments, **options):
        raise AssertionError("trained again")

    monkeypatch.setattr(module, "train", fail)
    assert compare(CONFIG, strategies, seeds, tmp_path) == rows
    with pytest.raises(ValueError, match=r"another one: expected the same lr=0.2 \(there: 0.1\)"):
        compare(dataclasses.replace(CONFIG, lr=0.2), strategies, seeds, tmp_path)


def test_only_strategies_that_quantize_are_planned(tiny, tmp_path, monkeypatch):
    planned = {}

    def finish(config, out, tensorboard):
        planned[config.strategy] = config.plan_steps
        return {"test_accuracy": [0.5], "loss": [1.0]}

    strategies = ["plain", "fused:bits=2", "actnn"]
    monkeypatch.setattr(module, "measure", lambda *arguments: dict.fromkeys(strategies))
    monkeypatch.setattr(module, "_finish", finish)
    config = dataclasses.replace(CONFIG, plan_steps=1)
    compare(config, strategies, [0], tmp_path)
    assert planned == {"plain": None, "fused:bits=2": None, "actnn": 1}
    with pytest.raises(
        ValueError, match=r"plan_steps=1: expected a strategy that quantizes in \['plain"
    ):
        compare(config, strategies[:2], [0], tmp_path)


def test_compare_stops_with_an_interrupted_run(tiny, tmp_path, monkeypatch):
    calls = []

    def interrupted(config, out, **options):
        calls.append(config.strategy)
        return TrainResult(None, None, finished=False)

    monkeypatch.setattr(module, "measure", lambda *arguments: {})
    monkeypatch.setattr(module, "train", interrupted)
    assert compare(CONFIG, ["plain", "remat"], [0], tmp_path) is None
    assert calls == ["plain"]


@pytest.mark.parametrize("name", ["file", "file/results"])
def test_out_that_cannot_be_made_is_refused_before_the_work(tmp_path, monkeypatch, name):
    (tmp_path / "file").write_text("a file")
    monkeypatch.setattr(module, "compare", None)
    app = module.typer.Typer(rich_markup_mode=None)
    app.command()(module.main)
    result = CliRunner().invoke(app, ["--out", str(tmp_path / name)])
    assert result.exit_code == 2
    assert f"out='{tmp_path / name}': expected a folder" in result.output


def test_report(tmp_path, capsys):
    rows = make_rows()
    report(CONFIG, [0, 1], rows, tmp_path)
    assert "XLA temp: temporary memory" in capsys.readouterr().out
    content = json.loads((tmp_path / "comparison.json").read_text())
    assert content["rows"] == [dataclasses.asdict(row) for row in rows]
    assert content["seeds"] == [0, 1]
    header, _, first, *_ = (tmp_path / "comparison.md").read_text().splitlines()
    assert header == f"| {' | '.join(HEADER)} |"
    assert first == "| plain | 62.50% ± 17.68% | 1.0 MiB | 32.50 | 3.0 MiB | 1.25 |"
    picture = matplotlib.image.imread(tmp_path / "comparison.png")
    assert picture.shape[1] > picture.shape[0] > 400
    assert picture.std() > 0.05  # something is drawn


def test_figure_not_given_is_said():
    assert mebibytes(None) == "not given by this backend"
