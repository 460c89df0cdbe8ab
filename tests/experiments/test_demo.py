import dataclasses
import json

import jax
import pytest

from experiments import demo
from experiments.compare import WAYS


@pytest.fixture
def small_demo(tiny, monkeypatch):
    config = dataclasses.replace(demo.CONFIG, model="tiny", epoch_steps=2, batch=16)
    monkeypatch.setattr(demo, "CONFIG", config)


def test_demo_compares_six_ways(small_demo, tmp_path, capsys):
    demo.main(tmp_path)
    content = json.loads((tmp_path / "comparison.json").read_text())
    assert [row["way"] for row in content["rows"]] == list(WAYS)
    assert (tmp_path / "comparison.png").exists()
    printed = capsys.readouterr().out
    assert all(way in printed for way in ("plain", "remat", "quantize:bits=2"))
    assert jax.config.jax_compilation_cache_dir is None


def test_demo_reports_nothing_when_stopped(small_demo, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "compare", lambda *arguments, **options: None)
    with pytest.raises(demo.typer.Exit):
        demo.main(tmp_path)
    assert list(tmp_path.iterdir()) == []
