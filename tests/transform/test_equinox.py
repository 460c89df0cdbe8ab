"""An Equinox model as its users write it, through `checkpoint`."""

import equinox as eqx
import jax
import jax.numpy as jnp

import jaxcomp as jc
from tests.helpers import assert_close, assert_same_bits, assert_unbiased, normal


class Network(eqx.Module):
    layers: list
    norm: eqx.nn.LayerNorm

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.layers = [eqx.nn.Linear(32, 128, key=first), eqx.nn.Linear(128, 8, key=second)]
        self.norm = eqx.nn.LayerNorm(128)

    def __call__(self, x):
        return self.layers[1](jax.nn.gelu(self.norm(self.layers[0](x))))


MODEL = Network(jax.random.key(0))
X = normal((256, 32))


def forward(model, x):
    return jax.vmap(model)(x)


def gradient(codec=None, seed=0):
    run = forward if codec is None else jc.checkpoint(forward, codec, seed=seed)
    return eqx.filter_grad(lambda model: jnp.sin(run(model, X)).sum())(MODEL)


def test_results_are_the_models_own_and_codes_wait():
    run = jc.checkpoint(forward, jc.Quantize(bits=4))
    assert_same_bits(eqx.filter_jit(run)(MODEL, X), eqx.filter_jit(forward)(MODEL, X))
    plan = run.plan(MODEL, X)
    assert sum("Quantize(bits=4" in value.decision for value in plan.values) == 3
    assert sum(v.saved_bytes for v in plan.values) < 0.1 * plan.exact_bytes


def test_exact_gives_the_stock_gradient():
    exact, stock = (eqx.filter_jit(gradient)(codec) for codec in (jc.Exact(), None))
    assert_close(exact, stock)


def test_the_gradient_is_unbiased():
    def kernel(seed):
        return gradient(jc.Quantize(bits=2), seed).layers[1].weight

    draws = jax.jit(lambda seeds: jax.lax.map(kernel, seeds, batch_size=50))(jnp.arange(400))
    assert_unbiased(draws, eqx.filter_jit(gradient)().layers[1].weight)
