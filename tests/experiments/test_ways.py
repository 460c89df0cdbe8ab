import pytest

from experiments.ways import Way
from jaxcomp import recipes


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("plain", Way("plain")),
        ("remat", Way("remat", remat=True)),
        ("accumulate:4", Way("accumulate:4", micro_batches=4)),
        ("quantize:bits=2", Way("quantize:bits=2", rules=recipes.from_spec("quantize:bits=2"))),
    ],
)
def test_parse(spec, expected):
    assert Way.parse(spec) == expected


@pytest.mark.parametrize(
    "spec",
    ["accumulate", "accumulate:", "accumulate:0", "accumulate:1", "accumulate:-2", "accumulate:x"],
)
def test_parse_wrong_accumulate(spec):
    with pytest.raises(ValueError, match=rf"way='{spec}': expected accumulate:N with N=2 or more"):
        Way.parse(spec)


@pytest.mark.parametrize("spec", ["", "plane", "plain:2", "remat:dots", "quantize:bits=5"])
def test_parse_unknown(spec):
    with pytest.raises(ValueError, match=rf"way='{spec}': expected plain, remat, accumulate:N, or"):
        Way.parse(spec)


def test_check_batch():
    Way.parse("accumulate:2").check_batch(batch=16, devices=8)
    with pytest.raises(ValueError, match="batch=24: expected a multiple of 16"):
        Way.parse("accumulate:2").check_batch(batch=24, devices=8)
    with pytest.raises(ValueError, match="batch=12: expected a multiple of 8"):
        Way.parse("plain").check_batch(batch=12, devices=8)
    with pytest.raises(ValueError, match="batch=16: expected a multiple of 3"):
        Way.parse("accumulate:3").check_batch(batch=16, devices=1)
