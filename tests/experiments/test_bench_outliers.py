import numpy as np
import pytest

from experiments.bench import outliers


@pytest.fixture(scope="module")
def found():
    return {
        (kind, name): outliers.errors(x, *code)
        for kind, x in outliers.made(seed=0).items()
        for name, code in outliers.CODES.items()
        if name.startswith("4")
    }


def test_outlier_channels_do_not_matter_as_each_channel_has_its_range(found):
    for name in ("4 bits", "4 bits, dither"):
        normal, outlying = (found[kind, name] for kind in ("normal", "outlier channels"))
        np.testing.assert_allclose(outlying["mean"], normal["mean"], rtol=0.02)
    assert found["massive tokens", "4 bits"]["median"] < 1.02 * found["normal", "4 bits"]["median"]


def test_a_rotation_spreads_outliers_over_all_channels(found):
    assert found["outlier channels", "4 bits, rotated"]["median"] > (
        5 * found["outlier channels", "4 bits"]["median"]
    )


def test_a_rotation_is_its_own_inverse():
    x = outliers.made(seed=1)["normal"]
    np.testing.assert_allclose(outliers.rotated(outliers.rotated(x)), x, atol=1e-4)
