"""Steps of models by name: all take strategies, a dtype and a mesh."""

import jax
import jax.numpy as jnp
import pytest

import jaxcomp as jc
from jaxcomp.models import steps
from jaxcomp.planning import Strategy

CASES = [
    ("lm", None, "quantize:bits=4"),
    *(("scanned_lm", None, "remat"), ("vit_b16", 32, "remat"), ("efficientnet_b0", 32, "remat")),
]
MESH = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.mark.parametrize(("name", "image", "row"), CASES)
def test_stock_models_take_strategies(name, image, row):
    def declared(spec):
        make_step = steps.by_name(name, image, jnp.float32, MESH, fsdp=True)
        step, (state, inputs, labels) = make_step(Strategy.parse(spec), 2)
        assert inputs.shape[0] == 2 and inputs.sharding.spec == labels.sharding.spec
        assert any("data" in leaf.sharding.spec for leaf in jax.tree.leaves(state.params))
        residuals = jc.memory.declared_residuals(step.trace(state, inputs, labels).jaxpr)
        return sum(residual.nbytes for residual in residuals)

    assert declared(row) < 0.7 * declared("plain")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("vit_b1",), "name='vit_b1': expected one of .*; did you mean 'vit_b16'?"),
        (("lm", 224), "image=224: lm takes no images"),
        (("vit_b16", 0), "image=0: expected a positive number of pixels"),
        (("vit_b16", 100), "image=100: expected a multiple of 16"),
    ],
)
def test_other_models_are_errors(arguments, error):
    with pytest.raises(ValueError, match=error):
        steps.by_name(*arguments)
