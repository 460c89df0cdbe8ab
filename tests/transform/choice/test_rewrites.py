"""Casts to few digits are staircases: of decoded values they would have another mean."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxcomp as jc
from tests.helpers import error_of_mean, kept, normal

X, W, V = normal((64, 24)), normal((24, 24), seed=1) / 4, normal((24, 24), seed=2) / 4
DRAWS = 512


def _cast(dtype, x):
    return x.astype(dtype).astype(jnp.float32)


COARSE = {
    "float8_e4m3fn": functools.partial(_cast, jnp.float8_e4m3fn),
    "float8_e5m2": functools.partial(_cast, jnp.float8_e5m2),
    "1 digit": lambda x: lax.reduce_precision(x, 8, 1),
    "small range": lambda x: lax.reduce_precision(x, 3, 10),
}
FINE = {
    "bfloat16": functools.partial(_cast, jnp.bfloat16),
    "float16": functools.partial(_cast, jnp.float16),
    "7 digits": lambda x: lax.reduce_precision(x, 8, 7),
}


def _layer(cast, w, v):
    z = jnp.exp(0.5 * (X @ w))
    return cast(z) @ v + jnp.sin(z)


@pytest.mark.parametrize("cast", kept(COARSE | FINE, ("float8_e4m3fn", "small range", "7 digits")))
def test_a_product_of_a_cast_has_an_unbiased_gradient(cast):
    layer = functools.partial(_layer, (COARSE | FINE)[cast])
    exact = np.asarray(jax.grad(lambda v: layer(W, v).sum())(V))

    @jax.jit
    @jax.vmap
    def draw(seed):
        coded = jc.checkpoint(layer, jc.Quantize(bits=2), seed=seed)
        return jax.grad(lambda w, v: coded(w, v).sum(), (0, 1))(W, V)[1]

    # All columns of the gradient are equal: 24 numbers.
    error, chance = error_of_mean(draw(jnp.arange(DRAWS)), exact)
    assert chance > 1e-4 * np.linalg.norm(exact)  # there is noise
    assert error < 1.8 * chance
    notes = jc.checkpoint(layer, jc.Quantize(bits=2)).plan(W, V).notes
    assert any("casts round cotangents" in note for note in notes) == (cast in COARSE)


@pytest.mark.parametrize("cast", FINE)
def test_casts_of_mixed_precision_need_no_code_of_their_own(cast):
    values = jc.checkpoint(functools.partial(_layer, FINE[cast]), jc.Quantize(bits=4)).plan(W, V)
    plain = jc.checkpoint(functools.partial(_layer, lambda x: x), jc.Quantize(bits=4)).plan(W, V)
    assert values.saved_bytes == plain.saved_bytes
