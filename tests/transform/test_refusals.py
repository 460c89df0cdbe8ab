"""Arguments of `checkpoint` that make no sense are errors."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxcomp as jc
from tests.helpers import only, without_type_checks
from tests.transform.mlp import CODEC, W1, W2, X, mlp


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (only(CODEC, names=("nothing",)), "matches nothing.*names: count, hidden"),
        (only(CODEC, names=("count",)), "only float32, bfloat16 and float16"),
        (lambda primitive, *avals, **params: 3, "policy answers 3"),
        (lambda primitive, *avals, **params: np.ones(2), "policy answers array"),
        (lambda primitive, *avals, **params: CODEC, "policy answers Quantize"),
    ],
)
def test_policies_that_make_no_sense_are_refused(policy, message):
    def f(x, w):
        count = checkpoint_name(jnp.int32(w.shape[0]) + jnp.argmax(x), "count")
        return jnp.sin(checkpoint_name(x @ w, "hidden")) * count

    with pytest.raises((TypeError, ValueError), match=message):
        jc.checkpoint(f, policy).plan(X, W1)


def test_arguments_that_make_no_sense_are_refused():
    with without_type_checks():
        _check_refusals()


def _check_refusals():
    for policy in (None, jc.Quantize, 4):
        with pytest.raises(TypeError, match="policy="):
            jc.checkpoint(mlp, policy)
    with pytest.raises(ValueError, match="spec='quantise': unknown codec or recipe"):
        jc.checkpoint(mlp, "quantise")
    with pytest.raises(ValueError, match="op is for layers"):
        jc.checkpoint(mlp, "fused:bits=4").plan(X, W1, W2)
    with pytest.raises(TypeError, match="fn="):
        jc.checkpoint(3, CODEC)
    with pytest.raises(
        TypeError, match=r"argument \[0\]\['act'\] is of type PjitFunction: expected"
    ):
        jc.checkpoint(lambda layer, x: layer["act"](x), CODEC)({"act": jnp.sin}, X)
    with pytest.raises(TypeError, match="seed="):
        jc.checkpoint(mlp, CODEC, seed=1.5)
    with pytest.raises(TypeError, match="coded_argnums="):
        jc.checkpoint(mlp, CODEC, coded_argnums="x")
    with pytest.raises(ValueError, match="coded_argnums="):
        jc.checkpoint(mlp, CODEC, coded_argnums=3)(X, W1, W2)
    with pytest.raises(ValueError, match="no gradient"):
        jc.checkpoint(lambda: 1, CODEC).plan()
