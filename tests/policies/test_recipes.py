import pytest

import jaxcomp as jc
from jaxcomp.policies import recipes
from tests.helpers import without_type_checks


def _decide(rules: tuple[jc.Rule, ...], kind: str) -> jc.Codec | None:
    return next((rule.codec for rule in rules if rule.matches("any/path", kind)), None)


@pytest.mark.parametrize(
    ("spec", "codec"),
    [
        ("quantize", jc.Quantize()),
        ("quantize:bits=8", jc.Quantize(bits=8)),
        (
            "quantize:bits=3,group=sample,rounding=nearest",
            jc.Quantize(bits=3, group="sample", rounding="nearest"),
        ),
        ("avg_pool:window=3", jc.AvgPool(window=3)),
        ("cast:dtype=float16", jc.Cast("float16")),
        ("block_sparse:block=8,density=0.25", jc.BlockSparse(block=8, density=0.25)),
        ("block_sparse:block=8x16", jc.BlockSparse(block=(8, 16))),
    ],
)
def test_spec_is_its_codec_in_every_operation_that_can_store_by_it(
    spec: str, codec: jc.Codec
) -> None:
    rules = recipes.from_spec(spec)
    for kind in ("conv", "dot", "batch_norm"):  # with AvgPool the input of convolutions only
        assert _decide(rules, kind) == (codec if kind in codec.kinds else None)
    assert "conv" in codec.kinds
    assert _decide(rules, "relu") == jc.Packed(bits=1)
    assert _decide(rules, "max_pool") == jc.Packed(bits=4)


def test_fused_has_bits_and_a_unit() -> None:
    rules = recipes.from_spec("fused:bits=2,unit=range,two_passes=true")
    assert rules == recipes.fused(bits=2, unit="range", two_passes=True)
    assert _decide(rules, "norm_act") == jc.SignAware(2, unit="range", two_passes=True)


def test_exact_is_for_everything() -> None:
    rules = (jc.Rule(jc.Exact(), required=False),)
    assert recipes.from_spec("exact") == recipes.everywhere(jc.Exact()) == rules


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fused:unit=channel", "unit"),
        ("fused:two_passes=yes", "two_passes='yes' is not true or false"),
        ("", "unknown codec ''"),
        ("quantise:bits=2", "unknown codec 'quantise'"),
        ("Quantize", "unknown codec 'Quantize'"),
        ("packed:bits=1", "unknown codec 'packed'"),
        ("quantize:bit=2", "unknown option 'bit'"),
        ("quantize:window=2", "unknown option 'window'"),
        ("quantize:bits=2,", "unknown option ''"),
        ("exact:bits=2", "unknown option 'bits'"),
        ("quantize:bits=2.5", "bits='2.5' is not an integer"),
        ("quantize:bits", "bits='' is not an integer"),
        ("avg_pool:window=two", "window='two' is not an integer"),
        ("block_sparse:block=8x", "block='8x' is not an integer or two"),
        ("block_sparse:block=0", "block=0: expected a positive integer"),
        ("block_sparse:density=some", "density='some' is not a number"),
        ("block_sparse:density=nan", "density=nan: expected more than 0"),
        ("block_sparse:values=exact", "values"),
        ("quantize:bits=5", "bits=5: expected one of"),
        ("quantize:bits=-2", "bits=-2: expected one of"),
        ("quantize:bits=2,bits=4", "'bits' is given twice"),
        ("quantize:group=layer", "layer"),
        ("quantize:rounding=", "rounding"),
        ("avg_pool:window=0", "window=0: expected a positive"),
        ("cast:dtype=int8", "dtype='int8'"),
        ("cast:dtype=float99", "dtype='float99'"),
    ],
)
def test_bad_spec_is_an_error_that_names_it(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match="spec=") as error:
        recipes.from_spec(spec)
    assert repr(spec) in str(error.value)
    assert message in str(error.value)


def test_pooling_is_for_every_convolution():
    papers = recipes.pooling(window=4)
    assert _decide(papers, "conv") == jc.AvgPool(4)
    assert _decide(papers, "batch_norm") is _decide(papers, "dot") is None
    mixed = recipes.from_spec("pooling:window=2,rest_bits=4")
    assert _decide(mixed, "conv") == jc.AvgPool(2)
    for kind in ("batch_norm", "layer_norm", "dot", "affine", "gelu"):
        assert _decide(mixed, kind) == jc.Quantize(4)
    for rules in (papers, mixed):
        assert _decide(rules, "relu") == jc.Packed(bits=1)
        assert _decide(rules, "max_pool") == jc.Packed(bits=4)


def test_specs_of_parts_of_a_model():
    rules = recipes.from_spec("avg_pool:window=4 @ blocks/[01]/.* + pooling:window=2")
    assert rules[len(rules) - 3 :] == recipes.pooling(2)
    for path, window in (("blocks/1/conv", 4), ("blocks/2/conv", 2)):
        found = next(rule.codec for rule in rules if rule.matches(path, "conv"))
        assert found == jc.AvgPool(window)
    with pytest.raises(ValueError, match="unknown codec ''"):
        recipes.from_spec("avg_pool:window=4 + ")
    with pytest.raises(ValueError, match=r"path='\[': not a regular expression"):
        recipes.from_spec("avg_pool:window=4 @ [")


def test_levels_of_actnn():
    bits = {
        level: {rule.op: rule.codec.bits for rule in recipes.actnn(level) if rule.required}
        for level in ("L1", "L2", "L3")
    }
    assert bits["L1"] == {"conv": 4}
    assert set(bits["L2"].values()) == {4} and set(bits["L3"].values()) == {2}
    assert all("batch_norm" in op for level in ("L2", "L3") for op in bits[level])
    assert recipes.from_spec("actnn:level=L2") == recipes.actnn("L2")
    assert recipes.from_spec("offload:actnn:level=L3") == recipes.actnn("L4")
    assert recipes.actnn("L5") == recipes.offloaded(recipes.actnn("L3"), in_turn=True)
    assert _decide(recipes.actnn("L5"), "batch_norm").in_turn
    assert recipes.offloaded(recipes.actnn("L4"), in_turn=True) == recipes.actnn("L5")
    assert recipes.offloaded(recipes.actnn("L5")) == recipes.actnn("L5")
    assert recipes.actnn("L0") == recipes.everywhere(jc.Exact())
    with without_type_checks(), pytest.raises(ValueError, match="level='L9': expected one of"):
        recipes.from_spec("actnn:level=L9")


def test_windows_of_linear_layers_lie_along_their_features():
    rules = recipes.division()
    assert _decide(rules, "dot") == jc.DualPrecision(along="features")
    assert _decide(rules, "conv") == jc.DualPrecision(along="map")
