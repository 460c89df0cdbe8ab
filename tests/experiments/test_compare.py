import dataclasses
import json
import math

import jax
import matplotlib.image
import numpy as np
import pytest

from experiments import compare as module
from experiments.compare import HEADER, compare, report
from experiments.config import TrainConfig
from experiments.measure import measure
from experiments.run import build
from experiments.train import TrainResult
from jaxcomp import memory

CONFIG = TrainConfig(model="tiny", dataset="tiny", epochs=1, batch=16)
WAYS = ["plain", "accumulate:2", "quantize:bits=2"]


@pytest.fixture
def rows(tiny, tmp_path):
    return compare(CONFIG, WAYS, [0, 1], tmp_path / "runs", rounds=1)


def test_measure(tiny):
    result = measure(CONFIG, WAYS, tiny, rounds=2)
    assert list(result) == WAYS
    plain, accumulate, quantize = result.values()
    assert plain.step_time_ratio == 1
    assert all(m.step_seconds > 0 and m.temp_bytes > 0 for m in result.values())
    ratio = accumulate.declared_residual_bytes / plain.declared_residual_bytes
    assert ratio == pytest.approx(0.5, abs=0.02)
    assert quantize.declared_residual_bytes < 0.2 * plain.declared_residual_bytes

    batch = next(tiny.batches("train", 16, seed=0, epoch=0, augment=False, drop_remainder=True))
    run = build(CONFIG, tiny)
    residuals = memory.declared_residuals(jax.make_jaxpr(run.train_step)(run.state, *batch))
    floats = [r for r in residuals if r.dtype == "float32"]
    elements = sum(math.prod(r.shape) for r in floats)
    masks = sum(r.nbytes for r in residuals) - 4 * elements
    assert plain.bits_per_element == pytest.approx(32 + 8 * masks / elements)
    expected = 8 * quantize.declared_residual_bytes / elements
    assert quantize.bits_per_element == pytest.approx(expected)


def test_measure_needs_plain_first(tiny):
    with pytest.raises(ValueError, match=r"ways=\['remat', 'plain'\]: expected plain first"):
        measure(CONFIG, ["remat", "plain"], tiny, rounds=1)
    with pytest.raises(ValueError, match="rounds=0: expected 1 or more"):
        measure(CONFIG, ["plain"], tiny, rounds=0)


def test_compare_keeps_finished_runs(rows, tmp_path, monkeypatch):
    assert [row.way for row in rows] == WAYS
    assert all(len(row.test_accuracy) == 2 and len(row.loss) == 4 for row in rows)

    def fail(*arguments, **options):
        raise AssertionError("trained again")

    monkeypatch.setattr(module, "train", fail)
    again = compare(CONFIG, WAYS, [0, 1], tmp_path / "runs", rounds=1)
    assert [(r.test_accuracy, r.loss) for r in again] == [(r.test_accuracy, r.loss) for r in rows]
    with pytest.raises(ValueError, match=r"another one: expected the same lr=0.2 \(there: 0.1\)"):
        compare(dataclasses.replace(CONFIG, lr=0.2), WAYS, [0], tmp_path / "runs", rounds=1)


def test_compare_stops_with_an_interrupted_run(tiny, tmp_path, monkeypatch):
    calls = []

    def interrupted(config, out, **options):
        calls.append(config.way)
        return TrainResult(None, None, finished=False)

    monkeypatch.setattr(module, "train", interrupted)
    assert compare(CONFIG, ["plain", "remat"], [0], tmp_path / "runs", rounds=1) is None
    assert calls == ["plain"]


def test_report(rows, tmp_path, capsys):
    report(CONFIG, [0, 1], rows, tmp_path)
    printed = capsys.readouterr().out
    assert "XLA's temp bytes" in printed
    content = json.loads((tmp_path / "comparison.json").read_text())
    assert content["rows"] == [dataclasses.asdict(row) for row in rows]
    assert content["seeds"] == [0, 1]
    table = (tmp_path / "comparison.md").read_text().splitlines()
    assert table[0] == f"| {' | '.join(HEADER)} |"
    for row, line in zip(rows, table[2:5], strict=True):
        mean, std = np.mean(row.test_accuracy), np.std(row.test_accuracy, ddof=1)
        assert line.startswith(f"| {row.way} | {mean:.2%} ± {std:.2%} | ")
    picture = matplotlib.image.imread(tmp_path / "comparison.png")
    assert picture.shape[1] > picture.shape[0] > 400
    assert picture.std() > 0.05  # something is drawn
