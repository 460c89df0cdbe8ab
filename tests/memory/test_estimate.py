"""The estimated time against sums by hand."""

from dataclasses import replace

import pytest

from jaxcomp.memory._estimate import estimated_seconds
from jaxcomp.memory._targets import Target

GPU = Target(
    "gpu",
    "cuda",
    attached=False,
    devices=2,
    bandwidth=100,
    flops_per_second=10.0,
    link_bandwidth=4,
    vector_operations_per_second=50.0,
)
FIGURES = {
    "hbm_traffic_bytes": 300,
    "flops": 40,
    "host_traffic_bytes": 2,
    "estimated_cycles": None,
    "vector_operations": 25,
    "kernels": 1000,
}


def test_the_times_of_a_gpu_add_up():
    expected = 300 / 100 + 40 / 2 / 10 + 2 / 4 + 25 / 50 + 1000 * 2e-6
    assert estimated_seconds(FIGURES, GPU) == pytest.approx(expected)


def test_a_tpu_of_known_clock_takes_its_cycles():
    tpu = replace(GPU, platform="tpu", clock=8.0, vector_operations_per_second=None)
    assert estimated_seconds(FIGURES | {"estimated_cycles": 16}, tpu) == 2 / 4 + 16 / 8
    without = estimated_seconds(FIGURES | {"estimated_cycles": 16}, replace(tpu, clock=None))
    assert without == pytest.approx(300 / 100 + 40 / 2 / 10 + 2 / 4)


@pytest.mark.parametrize("unknown", ["hbm_traffic_bytes", "flops"])
def test_no_time_is_made_up(unknown):
    assert estimated_seconds(FIGURES | {unknown: None}, GPU) is None
    assert estimated_seconds(FIGURES, replace(GPU, bandwidth=None)) is None
