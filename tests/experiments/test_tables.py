"""Tables of README.md and docs/ are those of the records."""

import pytest

from experiments.tables.columns import bias, is_biased, name, needed, ratio
from experiments.tables.declared import TABLES
from experiments.tables.pages import ROOT, Source, figure, names, pages, written
from experiments.tables.rows import Row


def test_no_table_is_stale():
    stale = [str(p.relative_to(ROOT)) for p in pages() if written(p, TABLES) != p.read_text()]
    assert stale == []  # `make tables` writes them


def test_every_declared_table_is_on_a_page():
    assert {name for page in pages() for name in names(page)} == set(TABLES)


def test_every_marker_has_an_end():
    for page in pages():
        text = page.read_text()
        assert text.count("<!-- table: ") == len(names(page)), page
        assert text.count("<!-- figure: ") == text.count("<!-- end -->"), page


def test_a_row_that_the_record_lacks_is_named():
    with pytest.raises(ValueError, match=r"rows .'fused:bits=5'. are not in the record"):
        Source("resnet50-h100/memory.json", ("plain", "fused:bits=5")).read()
    with pytest.raises(ValueError, match="a100"):
        Source("zoo/zoo.json", where={"target": "a100"}).read()


def test_a_figure_of_a_sentence_is_one_cell():
    cell = figure(TABLES["zoo-h100"], "resnet50_nnx, plain", "needs, MiB")
    assert cell in written(ROOT / "docs" / "choose.md", TABLES)
    with pytest.raises(ValueError, match="'plain': expected the name of one row, found 1"):
        figure(TABLES["zoo-h100"], "plain", "needs, MiB")


def test_cells_say_what_the_figures_bear():
    values = {"total_bytes": 3 * 2**20, "fits": False, "low": 0.0, "high": 0.004, "bias": 0.001}
    row = Row("fused:bits=2", values, {"total_bytes": 2 * 2**20})
    assert name(row) == "`fused:bits=2` (biased)"
    assert name(Row("fit:0.9", {"chosen": "plan 1"}, {})) == "`fit:0.9` (`plan 1`)"
    assert needed(row) == "3 (does not fit)"
    assert (ratio("total_bytes")(row), ratio("estimated_seconds")(row)) == ("1.50", "")
    assert bias(row) == "0.001 (to 0.004)"
    rows = "boundary:offload:exact", "boundary:quantize:bits=8", "pooling:window=2", "automatic"
    assert [is_biased(spec) for spec in rows] == [False, True, True, False]
