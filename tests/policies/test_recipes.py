import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxcomp as jc
from jaxcomp.policies import from_spec, recipes
from tests.helpers import without_type_checks


def _decide(policy: jc.Policy, kind: str, path: str = "any/path") -> object:
    return next((rule.action for rule in policy.rules if rule.matches_layer(path, kind)), None)


@pytest.mark.parametrize(
    ("spec", "codec"),
    [
        ("quantize", jc.Quantize()),
        ("quantize:bits=8", jc.Quantize(bits=8)),
        (
            "quantize:bits=3,group=sample,rounding=nearest",
            jc.Quantize(bits=3, group="sample", rounding="nearest"),
        ),
        ("cast:dtype=float16", jc.Cast("float16")),
        ("block_sparse:block=8,density=0.25", jc.BlockSparse(block=8, density=0.25)),
        ("block_sparse:block=8x16", jc.BlockSparse(block=(8, 16))),
    ],
)
def test_spec_is_its_codec_in_every_operation_that_can_store_by_it(
    spec: str, codec: jc.Codec
) -> None:
    policy = from_spec(spec)
    assert policy == recipes.everywhere(codec)
    for kind in ("conv", "dot", "batch_norm"):
        assert _decide(policy, kind) == (codec if kind in codec.kinds else None)
    assert _decide(policy, "relu") == jc.Packed(bits=1)
    assert _decide(policy, "max_pool") == jc.Packed(bits=4)


def test_fused_has_bits_and_a_source_of_scales() -> None:
    policy = from_spec("fused:bits=2,scale_source=range")
    assert policy == recipes.fused(bits=2, scale_source="range")
    assert _decide(policy, "norm_act") == jc.SignAware(2, scale_source="range")


def test_boundary_has_a_spec() -> None:
    assert from_spec("boundary:quantize:bits=8") == recipes.boundary(jc.Quantize(bits=8))
    with pytest.raises(ValueError, match="expected a codec after 'boundary:'"):
        from_spec("boundary:fused")


def test_exact_keeps_everything() -> None:
    policy = jc.Policy((jc.Rule("keep", required=False),))
    assert from_spec("exact") == recipes.everywhere(jc.Exact()) == policy


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fused:scale_source=channel", "scale_source"),
        ("", "expected text such as 'quantize:bits=4'"),
        ("offload:offload:quantize", "expected 'offload:' once"),
        ("offload:", "spec='offload:': expected a codec after 'offload:'"),
        ("compress:quantize", "unknown codec or recipe 'compress'"),
        ("quantise:bits=2", "unknown codec or recipe 'quantise'"),
        ("Quantize", "unknown codec or recipe 'Quantize'"),
        ("packed:bits=1", "unknown codec or recipe 'packed'"),
        ("quantize:bit=2", "unknown option 'bit'"),
        ("quantize:window=2", "unknown option 'window'"),
        ("quantize:bits=2,", "unknown option ''"),
        ("exact:bits=2", "unknown option 'bits'"),
        ("quantize:bits=2.5", "bits='2.5' is not an integer"),
        ("quantize:bits", "bits='' is not an integer"),
        ("pooling:window=two", "window='two' is not an integer"),
        ("block_sparse:block=8x", "block='8x' is not an integer or two"),
        ("block_sparse:block=0", "block=0: expected a positive integer"),
        ("block_sparse:density=some", "density='some' is not a number"),
        ("block_sparse:density=nan", "density='nan' is not a number"),
        ("quantize:bits=٢", "is not an integer"),
        ("quantize:bits=+4", "bits='+4' is not an integer"),
        ("block_sparse:values=exact", "values"),
        ("quantize:bits=7", "bits=7: expected one of"),
        ("quantize:bits=-2", "bits=-2: expected one of"),
        ("quantize:bits=2,bits=4", "'bits' is given twice"),
        ("quantize:group=layer", "layer"),
        ("quantize:rounding=", "rounding"),
        ("pooling:window=0", "window=0: expected a positive"),
        ("cast:dtype=int8", "dtype='int8'"),
        ("cast:dtype=float99", "dtype='float99'"),
    ],
)
def test_bad_spec_is_an_error_that_names_it(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match="spec=") as error:
        from_spec(spec)
    assert repr(spec) in str(error.value)
    assert message in str(error.value)


def test_pooling_is_for_every_convolution():
    papers = recipes.pooling(window=4)
    assert _decide(papers, "conv") == jc.AvgPool(4)
    assert _decide(papers, "batch_norm") is _decide(papers, "dot") is None
    mixed = from_spec("pooling:window=2,rest_bits=4")
    assert _decide(mixed, "conv") == jc.AvgPool(2)
    for kind in ("batch_norm", "layer_norm", "dot", "affine", "gelu"):
        assert _decide(mixed, kind) == jc.Quantize(4)
    for rules in (papers, mixed):
        assert _decide(rules, "relu") == jc.Packed(bits=1)
        assert _decide(rules, "max_pool") == jc.Packed(bits=4)


def test_specs_of_parts_of_a_model():
    policy = from_spec("pooling:window=4 @ blocks/[01]/.* + pooling:window=2")
    assert policy == recipes.pooling(4).at("blocks/[01]/.*") + recipes.pooling(2)
    for path, window in (("blocks/1/conv", 4), ("blocks/2/conv", 2)):
        assert _decide(policy, "conv", path) == jc.AvgPool(window)
    with pytest.raises(ValueError, match="spec='': expected text such as"):
        from_spec("pooling:window=4 + ")
    with pytest.raises(ValueError, match=r"path='\[': not a regular expression"):
        from_spec("pooling:window=4 @ [")
    with without_type_checks(), pytest.raises(TypeError, match="spec=3: expected text"):
        from_spec(3)


def test_levels_of_actnn():
    exact, four, two = (recipes.everywhere(c) for c in (jc.Exact(), jc.Quantize(4), jc.Quantize(2)))
    assert recipes.actnn("L0") == exact
    assert recipes.actnn("L1") == jc.Policy((jc.Rule(jc.Quantize(4), op="conv"),))
    assert recipes.actnn("L2") == four == from_spec("actnn:level=L2")
    assert recipes.actnn("L3") == two
    assert recipes.actnn("L4") == two.offloaded() == from_spec("offload:actnn:level=L3")
    assert recipes.actnn("L5") == recipes.actnn("L4") == recipes.actnn("L4").offloaded()
    with without_type_checks(), pytest.raises(ValueError, match="level='L9': expected one of"):
        from_spec("actnn:level=L9")


def test_windows_of_linear_layers_lie_along_their_features():
    rules = recipes.division()
    assert _decide(rules, "dot") == jc.DualPrecision(along="features")
    assert _decide(rules, "conv") == jc.DualPrecision(along="map")


def test_named_values_are_offloaded_exactly():
    def product(weights, x):
        return jax.nn.gelu(checkpoint_name(x @ weights, "up")) @ weights.T

    policy = recipes.save_names({"up": jc.Offload(jc.Exact())})
    plan = jc.plan(jc.checkpoint(product, policy), jnp.ones((16, 32)), jnp.ones((8, 4, 16)))
    (value,) = (v for v in plan.values if v.decision == "offload")
    assert value.shape == (8, 4, 32)
    assert not any("biased" in note for note in plan.notes)


@pytest.mark.parametrize(("named", "error"), [(["up"], TypeError), ({}, ValueError)])
def test_bad_names_are_errors(named, error):
    with without_type_checks(), pytest.raises(error, match="named="):
        recipes.save_names(named)


def test_a_spec_means_the_same_in_checkpoint_as_elsewhere():
    w, x = jnp.ones((64, 8)), jnp.ones((8, 64))
    codec = jc.Quantize(bits=4)
    saved = [
        jc.plan(jc.checkpoint(lambda w, x: jnp.tanh(x @ w), policy), w, x).saved_bytes
        for policy in (
            "quantize:bits=4",
            "quantize:bits=4 @ .*",
            from_spec("quantize:bits=4"),
            codec,
        )
    ]
    assert saved[0] == saved[1] == saved[2] == 4 * 64
    assert saved[3] < saved[0]
