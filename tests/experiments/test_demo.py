import dataclasses
import json
import re

import jax
import pytest

from experiments import demo
from tests.planning import small


@pytest.mark.slow
def test_demo(tiny, tmp_path, monkeypatch, capsys):
    config = dataclasses.replace(demo.CONFIG, model="tiny", epoch_steps=1, batch=16)
    strategies = ["plain", "quantize:bits=2"]
    monkeypatch.setattr(demo, "CONFIG", config)
    monkeypatch.setattr(demo, "STRATEGIES", strategies)
    monkeypatch.setattr(demo, "STEP", small.make_step)
    monkeypatch.setattr(demo, "BATCH", small.BATCH)
    monkeypatch.setattr(demo, "TARGET", "cpu")
    cache = jax.config.jax_compilation_cache_dir
    demo.main(tmp_path)
    content = json.loads((tmp_path / "comparison.json").read_text())
    assert [row["strategy"] for row in content["rows"]] == strategies
    assert (tmp_path / "comparison.png").exists()
    printed = capsys.readouterr().out
    assert all(strategy in printed for strategy in strategies)
    sentence, table = (printed.index(text) for text in ("jaxcomp.compress(model): ", "step time"))
    assert re.search(r"needs \d+\.\d GiB, and \d+\.\d GiB after", printed)
    assert sentence < table  # the sentence is first
    assert "test accuracy" not in printed
    assert printed.rstrip().endswith(demo.NEXT)
    assert (tmp_path / "memory.png").stat().st_size > 10_000
    assert "plain" in (tmp_path / "memory.html").read_text()
    assert jax.config.jax_compilation_cache_dir == cache


def test_demo_refuses_a_file_before_the_work(tmp_path, monkeypatch):
    out = tmp_path / "file"
    out.write_text("a file")
    monkeypatch.setattr(demo.before_after, "compile_both", None)
    with pytest.raises(demo.typer.BadParameter, match=r"out='.*file': expected a folder"):
        demo.main(out)


def test_demo_reports_nothing_when_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(demo.before_after, "compile_both", lambda *arguments: {})
    monkeypatch.setattr(demo.before_after, "draw", lambda *arguments: None)
    monkeypatch.setattr(demo.before_after, "sentence", lambda *arguments: "")
    monkeypatch.setattr(demo.memory, "draw_html", lambda *arguments, **options: None)
    monkeypatch.setattr(demo, "compare", lambda *arguments, **options: None)
    with pytest.raises(demo.typer.Exit):
        demo.main(tmp_path)
    assert list(tmp_path.iterdir()) == []
