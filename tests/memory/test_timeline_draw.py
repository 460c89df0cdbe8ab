"""The drawings hold what the timelines say, and stand alone."""

import json
import re

import jax
import jax.numpy as jnp
import pytest

from jaxcomp.memory._live_bytes import timeline
from jaxcomp.memory._timeline_draw import bytes_by_phase, draw_html


@pytest.fixture(scope="module")
def timelines():
    def step(x):
        return jax.value_and_grad(lambda x: jnp.sum(jnp.sort(x) ** 2))(x)

    small, large = (timeline(jax.jit(step), jnp.ones((n, 64))) for n in (64, 256))
    return {"plain": large, "half</script>": small}


def test_phases_add_up_to_the_live_bytes(timelines):
    t = timelines["plain"]
    sums = [sum(values) for values in zip(*bytes_by_phase(t).values(), strict=True)]
    assert sums == list(t.live_bytes)


def test_html_holds_the_data_and_loads_nothing(tmp_path, timelines):
    draw_html(tmp_path / "page.html", timelines)
    page = (tmp_path / "page.html").read_text()
    assert not re.search(r"(src|href)=|url\(|@import|fetch\(", page)
    (encoded,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    drawn = json.loads(encoded)["timelines"]
    assert [d["title"] for d in drawn] == list(timelines)
    for data, t in zip(drawn, timelines.values(), strict=True):
        assert data["live"] == list(t.live_bytes)
        assert data["peak"] == t.peak_bytes
        assert len(data["buffers"]) == len(t.buffers)


def test_nothing_to_draw_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="timelines: expected at least one"):
        draw_html(tmp_path / "file", {})


def test_a_path_that_cannot_be_written_is_an_error(tmp_path, timelines):
    with pytest.raises(OSError):
        draw_html(tmp_path / "missing" / "file.html", timelines)
