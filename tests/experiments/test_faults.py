"""Bad inputs and damaged files are told; `make nightly` also kills processes and fails rows."""

from experiments.checks import bad_inputs, damages
from tests.helpers import without_type_checks


def test_every_bad_input_is_named():
    with without_type_checks():
        rows = bad_inputs.run()
    assert len(rows) >= 200
    assert [row for row in rows if not row["told"]] == []


def test_every_damaged_file_is_told_and_nothing_is_lost():
    rows = damages.run(40, seed=1)
    assert [row for row in rows if not row["told"]] == []
    assert len({row["file"] for row in rows}) == 4
