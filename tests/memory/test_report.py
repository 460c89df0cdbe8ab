import json

import pytest

from jaxcomp.memory import MemoryReport

FIGURES = {
    "target": "h100",
    "argument_bytes": 3 * 2**20,
    "output_bytes": 2**20,
    "alias_bytes": 2**20,
    "temp_bytes": 5 * 2**30 + 2**29,
    "host_temp_bytes": 0,
    "peak_bytes": None,
    "total_bytes": 5 * 2**30 + 2**29 + 3 * 2**20,
    "constant_bytes": 0,
    "declared_residual_bytes": 1536,
    "capacity_bytes": 8 * 2**30,
    "usable_bytes": 6 * 2**30,
    "headroom_bytes": 2**29 - 3 * 2**20,
    "fits": True,
    "hbm_traffic_bytes": 7,
    "flops": 1_234_000_000,
    "estimated_cycles": None,
    "estimated_seconds": 0.25,
    "compile_seconds": 1.5,
    "xla_flag": None,
    "xla_recomputes": True,
    "host_traffic_bytes": 2**20,
    "collective_bytes": 2**21,
    "vector_operations": 4_000,
    "kernels": 12,
}


def table(report: MemoryReport) -> dict[str, str]:
    rows = [line.split("  ", maxsplit=1) for line in str(report).splitlines()]
    return {name.strip(): value.strip() for name, value in rows}


def test_host_traffic_and_collectives_are_rows_where_there_are_some():
    assert table(MemoryReport(**FIGURES))["host traffic"] == "1.0 MiB"
    assert table(MemoryReport(**FIGURES))["collectives"] == "2.0 MiB"
    none = MemoryReport(**FIGURES | {"host_traffic_bytes": 0, "collective_bytes": 0})
    assert not {"host traffic", "collectives"} & table(none).keys()


def test_dict_and_json_hold_every_figure():
    report = MemoryReport(**FIGURES)
    assert report.to_dict() == FIGURES
    assert json.loads(report.to_json()) == FIGURES


def test_table_has_human_units():
    rows = table(MemoryReport(**FIGURES))
    assert rows["target"] == "h100"
    assert rows["arguments"] == "3.0 MiB"
    assert rows["temp"] == "5.5 GiB"
    assert rows["declared residuals"] == "1.5 KiB"
    assert rows["HBM traffic"] == "7 B"
    assert rows["FLOPs"] == "1.234e+09"
    assert rows["vector operations"] == "4,000"
    assert rows["fits"] == "yes"
    assert len(rows) == len(FIGURES) - 1


def test_table_has_a_line_for_a_flag_that_was_needed():
    rows = table(MemoryReport(**FIGURES | {"xla_flag": "--xla_flag=1"}))
    assert rows["compiled with"] == "--xla_flag=1"


@pytest.mark.parametrize(("fits", "word"), [(False, "no"), (None, "not given by this backend")])
def test_table_says_whether_it_fits(fits, word):
    assert table(MemoryReport(**FIGURES | {"fits": fits}))["fits"] == word


def test_a_figure_that_is_not_given_is_never_a_number():
    always = {"target": "cpu", "declared_residual_bytes": 8, "constant_bytes": 8}
    absent = dict.fromkeys(FIGURES) | always
    rows = table(MemoryReport(**absent))
    unknown = "not given by this backend", "not known"
    given = {name for name, value in rows.items() if value not in unknown}
    assert given == {"target", "declared residuals", "constants"}
    assert set(json.loads(MemoryReport(**absent).to_json()).values()) == {None, "cpu", 8}
