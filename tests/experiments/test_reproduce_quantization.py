import pytest

from experiments.comparison.measure import Measurement
from experiments.comparison.paired import paired_difference
from experiments.comparison.rows import Row
from experiments.reproduce import quantization as module

COST = Measurement(2**20, 32.5, "cpu", 3 * 2**20, step_seconds=0.5, step_time_ratio=1.25)


def test_differences_are_between_runs_of_the_same_seed():
    rows = [
        Row("plain", [0.70, 0.80, 0.90], [1.0], COST),
        Row("fused:bits=2", [0.69, 0.79, 0.89], [1.0], COST),
        Row("division", [0.72, 0.80, 0.91], [1.0], COST),
    ]
    header, plain, fused, division = module.paired(rows)
    assert header == ["strategy", "test accuracy", "difference, 95% interval"]
    assert plain == ["plain", "80.00% ± 10.00%", ""]
    assert fused[2] == "-1.00 ± 0.00"
    assert division[2] == "+1.00 ± 2.48"  # 4.303 * 0.01 / sqrt(3)


@pytest.mark.parametrize("others", [[0.6], [0.6, 0.7], [[0.6], [0.7], [0.8]]])
def test_runs_that_are_no_pairs_are_refused(others):
    with pytest.raises(ValueError, match="expected as many figures"):
        paired_difference([0.7, 0.8, 0.9], others)
    with pytest.raises(ValueError, match="2 or more"):
        paired_difference([0.7], [0.6])
