"""Calls of a layer on arrays that are equal in part, such as padding, have independent noise."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxcomp as jc
from jaxcomp import Quantize, SignAware, nn, ops
from tests.helpers import normal, z_limit

CODEC, RNGS = Quantize(bits=2), nnx.Rngs(0)
LAYERS = {
    "gelu": nn.GELU(codec=CODEC),
    "silu": nn.SiLU(codec=CODEC),
    "layer_norm": nn.LayerNorm(64, codec=CODEC, rngs=RNGS),
    "norm_act": nn.NormAct(nn.BatchNorm(64, rngs=RNGS), codec=SignAware(bits=4)),
}
GIVEN = {
    "equal rows": jnp.broadcast_to(normal((1, 64)), (128, 64)),
    "random": normal((128, 64)),
}


@nnx.jit
def _gradient(layer, x):
    cotangent = normal((160, 64), seed=5)
    return nnx.grad(lambda layer, x: (ops.value(layer(x)) * cotangent).sum(), argnums=1)(layer, x)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("given", GIVEN)
def test_errors_of_what_is_equal_in_two_calls_are_independent(name, given):
    errors = []
    for seed in (1, 2):
        rest = normal((32, 64), seed=seed)
        x = jnp.concatenate([rest[:16], GIVEN[given], rest[16:]])
        stock = jc.uncompress(nnx.clone(LAYERS[name]))
        error = _gradient(LAYERS[name], x) - _gradient(stock, x)
        errors.append(np.asarray(error[16:144]))
    assert min(map(np.std, errors)) > 1e-3  # there is noise
    products = (errors[0] * errors[1]).sum(1)  # a layer norm's errors of a row are not independent
    assert abs(products.sum()) < z_limit(8) * np.linalg.norm(products)
