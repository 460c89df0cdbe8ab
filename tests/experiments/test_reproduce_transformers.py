import json

import numpy as np
import pytest

from experiments import language as module
from experiments.transformers import Shape


def run(validation):
    return {
        "loss": [2.0] * module.SMOOTHING,
        "validation": validation,
        "declared_bytes": 2**20,
        "temp_bytes": None,
    }


def test_batches_are_crops_of_the_text_and_the_same_for_a_seed():
    data = np.arange(200, dtype=np.uint8)
    one, two = (list(module.batches(data, 3, seed=5)) for _ in range(2))
    for (tokens, following), (again, _) in zip(one, two, strict=True):
        np.testing.assert_array_equal(tokens, again)
        np.testing.assert_array_equal(np.diff(tokens), 1)
        np.testing.assert_array_equal(following, tokens + 1)
        assert tokens.shape == (module.BATCH, module.LENGTH)


def test_a_run_learns_and_its_end_is_held_out(monkeypatch):
    monkeypatch.setattr(module, "SHAPE", Shape(width=16, depth=1, heads=2))
    monkeypatch.setattr(module, "LENGTH", 16)
    runs = module.Runs("remat", steps=60)
    assert len(runs.train) + len(runs.held_out) == len(module.text())
    assert runs.report.declared_residual_bytes > 0
    found, again = runs.run(seed=1), runs.run(seed=1)
    assert found == again
    assert len(found["loss"]) == 60
    assert found["loss"][-1] < found["loss"][0] - 1
    assert found["validation"] == pytest.approx(np.mean(found["loss"][-10:]), abs=0.5)


def test_seeds_are_compared_in_pairs(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "Runs", lambda spec, steps: pytest.fail("all runs are there"))
    (tmp_path / "runs").mkdir()
    for name, losses in {"plain": [1.0, 2.0], "remat": [1.1, 2.3]}.items():
        for seed, loss in enumerate(losses):
            (tmp_path / "runs" / f"{name}-{seed}-20.json").write_text(json.dumps(run(loss)))
    module.main(tmp_path, way=["plain", "remat"], seeds=2, steps=20)
    text = (tmp_path / "language.md").read_text()
    # A mean difference of 0.2, and 12.706 (Student, one degree of freedom) times its error of 0.1.
    assert "| remat | 1.7000 ± 0.8485 | +0.2000 ± 1.2706 | 1.0 MiB | not given" in text
    assert (tmp_path / "language.png").exists()
