"""The page holds what the timelines say, stands alone, and works in a browser."""

import csv
import dataclasses
import html
import io
import json
import pathlib
import re
import shutil
import subprocess

import jax
import jax.numpy as jnp
import pytest

from jaxcomp.memory._areas import (
    bytes_by_buffer,
    bytes_by_kind,
    bytes_by_module,
    bytes_by_phase,
)
from jaxcomp.memory._buffer import Buffer
from jaxcomp.memory._live_bytes import Timeline, format_bytes, timeline
from jaxcomp.memory._origin import Origin
from jaxcomp.memory._timeline_draw import draw_html


@pytest.fixture(scope="module")
def timelines():
    def step(x):
        return jax.value_and_grad(lambda x: jnp.sum(jnp.sort(x) ** 2))(x)

    small, large = (timeline(jax.jit(step), jnp.ones((n, 64))) for n in (64, 256))
    return {"plain": large, "half</script>": small}


def data_of(page):
    pattern = r'<script type="application/json" id="data">(.*?)</script>'
    (encoded,) = re.findall(pattern, page.read_text())
    return json.loads(encoded)


@pytest.mark.parametrize("by", [bytes_by_phase, bytes_by_kind, bytes_by_module, bytes_by_buffer])
def test_the_colors_add_up_to_the_live_bytes(timelines, by):
    t = timelines["plain"]
    sums = [sum(values) for values in zip(*by(t).values(), strict=True)]
    assert sums == list(t.live_bytes)


def test_kinds_tell_parameters_from_the_optimizer_and_what_is_saved_from_the_rest():
    def buffer(scope, phase, start, end, reads=()):
        origin = Origin(scope, "argument" if phase == "argument" else "mul", phase, "")
        return Buffer(scope, 2**start, "f32[1]", origin, start, end, reads, start, 0)

    buffers = (
        buffer("model/head/kernel", "argument", 0, 5),
        buffer("state.opt_state[0].mu['w']", "argument", 1, 5),
        buffer("images", "argument", 2, 5),
        buffer("blocks/1", "forward", 3, 5, reads=(3, 5)),
        buffer("blocks/2", "forward", 4, 5, reads=(4,)),
    )
    timeline = Timeline(
        ("p",) * 6, ("other",) * 6, (False,) * 6, (1, 3, 7, 15, 31, 31), buffers, 5, None
    )
    kinds = {name: values[-1] for name, values in bytes_by_kind(timeline).items()}
    assert kinds == {"parameters": 1, "optimizer": 2, "other": 4, "saved": 8, "temporary": 16}
    assert bytes_by_buffer(timeline)["blocks/2 · mul f32[1]"] == [0, 0, 0, 0, 16, 16]


def test_modules_are_named_below_the_outermost_and_the_smallest_are_summed():
    def model(x):
        with jax.named_scope("Net"):
            for k in range(12):
                with jax.named_scope(f"block{k}"), jax.named_scope("dense"):
                    x = jnp.sort(jnp.concatenate([x, x[:8]]))
        return x

    modules = bytes_by_module(timeline(jax.jit(model), jnp.ones(256)))
    named = [name for name in modules if name.startswith("block")]
    assert len(named) == 9 and "other modules" in modules
    assert modules["arguments"][0] == 1024


def test_the_largest_of_many_modules_is_divided_and_blocks_are_one():
    def model(x):
        for k in range(12):
            with jax.named_scope("blocks"), jax.named_scope(str(k)):
                with jax.named_scope("up"):
                    x = jnp.sort(jnp.concatenate([x, x]))
                with jax.named_scope("down"):
                    x = jnp.sort(x[::2])
        return x

    modules = bytes_by_module(timeline(jax.jit(model), jnp.ones(256)))
    assert modules.keys() >= {"up", "down"} and not any("11" in name for name in modules)


def test_sources_are_relative_to_the_folder(tmp_path, timelines):
    draw_html(tmp_path / "page.html", timelines, title="a <b>", subtitle="made & dated")
    page = (tmp_path / "page.html").read_text()
    assert str(pathlib.Path(__file__)) not in page and "tests/memory/test_timeline_draw.py:" in page
    assert "<h1>a &lt;b&gt;</h1>" in page and "made &amp; dated" in page


def test_an_axis_is_the_estimated_time_or_the_instructions(tmp_path, timelines):
    t = timelines["plain"]
    seconds = [0.0] * len(t.points)
    seconds[1], seconds[-1] = 0.003, 0.001
    drawn = {"without": t, "with": dataclasses.replace(t, seconds=tuple(seconds))}
    draw_html(tmp_path / "page.html", drawn)
    without, timed = data_of(tmp_path / "page.html")["timelines"]
    count = len(t.points)
    assert without["ends"] == [round(k / count, 7) for k in range(1, count + 1)]
    assert timed["ends"] == [0, *[0.75] * (count - 2), 1]
    assert [without["time"], timed["time"]] == [None, "4 ms"]


def test_html_holds_the_data_and_loads_nothing(tmp_path, timelines):
    draw_html(tmp_path / "page.html", timelines, limit=12345)
    page = (tmp_path / "page.html").read_text()
    assert not re.search(r"(src|href)=|url\(|@import|fetch\(", page)
    data = data_of(tmp_path / "page.html")
    assert data["limit"] == 12345
    assert [d["title"] for d in data["timelines"]] == list(timelines)
    for drawn, t in zip(data["timelines"], timelines.values(), strict=True):
        assert drawn["live"] == list(t.live_bytes)
        assert drawn["peak"] == t.peak_bytes
        columns = drawn["buffers"]
        assert columns["bytes"] == [b.bytes for b in t.buffers]
        assert [data["texts"][k] for k in columns["label"]] == [b.label() for b in t.buffers]


SCRIPT = """<script>
const [first] = document.querySelectorAll("svg");
const press = key => first.dispatchEvent(new KeyboardEvent("keydown", { key }));
const table = document.querySelector("main tbody");
const state = () => [first.getAttribute("aria-valuetext"), first.querySelectorAll("polygon").length,
                     table.rows.length];
const seen = [state()];
press("Home"); seen.push(state());
press("ArrowRight"); press("+"); press("p"); seen.push(state());
const choice = document.getElementById("colors");
const areas = ["byKind", "byModule", "byBuffer"].map(by => {
  choice.value = by; choice.dispatchEvent(new Event("change"));
  return state()[1];
});
seen.push(areas);
table.rows[0].click();
const differences = [...document.querySelectorAll("#differences tbody")].map(b => b.rows.length);
const field = document.getElementById("find");
seen.push([document.querySelector("h3").textContent, differences]);
document.querySelector("main th:nth-child(4) button").click();
seen.push([...table.rows].map(row => row.cells[3].textContent), csv(charts[0].listed()));
seen.push([...document.querySelectorAll("#summary tbody tr")].map(row => row.innerText));
field.value = "no such buffer"; field.dispatchEvent(new Event("input")); seen.push(state());
document.title = JSON.stringify(seen);
</script>"""


def test_the_page_works_in_a_browser(tmp_path, timelines):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium is installed")
    draw_html(tmp_path / "page.html", timelines, details={"plain": "1.0 GiB of 2.0 GiB: fits"})
    page = (tmp_path / "page.html").read_text().replace("</body>", SCRIPT + "</body>")
    (tmp_path / "page.html").write_text(page)
    command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    shown = subprocess.run(
        [*command, f"--user-data-dir={tmp_path}/profile", (tmp_path / "page.html").as_uri()],
        capture_output=True,
        check=True,
        text=True,
        timeout=120,
    ).stdout
    (title,) = re.findall("<title>(.*?)</title>", shown, re.DOTALL)
    start, home, peak, areas, (life, differences), *lists, found = json.loads(html.unescape(title))
    shapes, saved, sums = lists
    t = timelines["plain"]
    assert start == peak and start[0].startswith(f"instruction {t.peak_point}:")
    assert home[0].startswith("instruction 0:") and home[2] == len(t.alive(0))
    assert start[1] == len(bytes_by_phase(t))
    assert areas == [len(by(t)) for by in (bytes_by_kind, bytes_by_module, bytes_by_buffer)]
    assert shapes == sorted(shapes) and len(shapes) == peak[2]
    header, *rows = csv.reader(io.StringIO(saved))
    assert header[:3] == ["bytes", "number", "pass"] and [row[5] for row in rows] == shapes
    assert sum(int(row[0]) * int(row[1]) for row in rows) == t.peak_bytes
    assert len(sums) == 2 and sums[0].startswith(f"plain\t{format_bytes(t.peak_bytes)}\t")
    assert shown.count("<svg") == 2
    assert re.search(r": alive from \S+ \(\d+\) to \d+, (and|read) ", life)
    assert differences[0] == 5 and differences[1] > 0
    assert found[2] == 0
    assert "; 1.0 GiB of 2.0 GiB: fits" in shown


def test_nothing_to_draw_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="timelines: expected at least one"):
        draw_html(tmp_path / "file", {})


def test_a_path_that_cannot_be_written_is_an_error(tmp_path, timelines):
    with pytest.raises(OSError):
        draw_html(tmp_path / "missing" / "file.html", timelines)
