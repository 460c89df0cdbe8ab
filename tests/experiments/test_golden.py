import json
from pathlib import Path

import pytest

from experiments.bench import golden

COMMITTED = Path(golden.__file__).parents[1] / "results" / "golden-h100" / "golden.json"


def row(spec, traffic):
    sizes = {"temp_bytes": 10, "peak_bytes": 20, "hbm_traffic_bytes": traffic}
    return {"model": "lm", "batch": 8, "row": spec} | sizes


def test_differences_name_the_row_and_the_figure():
    before = [row("plain", 30), row("remat", 40)]
    assert golden.differences(before, before) == []
    found = golden.differences(before, [row("plain", 30), row("remat", 41)])
    assert found == ["lm remat: hbm_traffic_bytes 40 -> 41"]
    with pytest.raises(ValueError, match="shorter"):
        golden.differences(before, before[:1])


def test_committed_rows_are_those_that_are_compiled():
    rows = json.loads(COMMITTED.read_text())["rows"]
    expected = [(model, spec) for model, specs in golden.ROWS.items() for spec in specs]
    assert [(row["model"], row["row"]) for row in rows] == expected


@pytest.mark.aot
@pytest.mark.parametrize(
    "before",
    json.loads(COMMITTED.read_text())["rows"],
    ids=lambda row: f"{row['model']}-{row['row']}",
)
def test_no_row_grows_by_more_than_a_fiftieth(before):
    now = golden.compiled(before["model"], before["row"], "h100")
    for figure in golden.FIGURES:
        print(f"{now['model']} {now['row']}: {figure} {now[figure]:,}, {before[figure]:,} before")
        assert now[figure] <= 1.02 * before[figure]
