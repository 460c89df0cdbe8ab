import pytest

import jaxcomp as jc
from jaxcomp import recipes


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
    ],
)
def test_spec_is_its_codec_in_every_operation_that_can_store_by_it(
    spec: str, codec: jc.Codec
) -> None:
    rules = recipes.from_spec(spec)
    everywhere = not isinstance(codec, jc.AvgPool)  # it stores the input of convolutions only
    assert _decide(rules, "conv") == codec
    assert _decide(rules, "dot") == (codec if everywhere else None)
    assert _decide(rules, "batch_norm") == (codec if everywhere else None)
    assert _decide(rules, "relu") == jc.Packed(bits=1)
    assert _decide(rules, "max_pool") == jc.Packed(bits=4)


def test_exact_is_for_everything() -> None:
    rules = (jc.Rule(jc.Exact(), required=False),)
    assert recipes.from_spec("exact") == recipes.everywhere(jc.Exact()) == rules


@pytest.mark.parametrize(
    ("spec", "message"),
    [
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
