"""An Equinox model as its users write it, through `checkpoint`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp as jc
from tests.helpers import assert_close, assert_same_bits, assert_unbiased, error_of_mean, normal


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
    assert sum("Quantize(bits=4" in value.decision for value in plan.values) == 2
    assert sum(v.saved_bytes for v in plan.values) < 0.1 * plan.exact_bytes


def test_exact_gives_the_stock_gradient():
    exact, stock = (eqx.filter_jit(gradient)(codec) for codec in (jc.Exact(), None))
    assert_close(exact, stock)


@pytest.mark.slow
def test_the_gradient_is_unbiased():
    def kernel(seed):
        return gradient(jc.Quantize(bits=2), seed).layers[1].weight

    draws = jax.jit(lambda seeds: jax.lax.map(kernel, seeds, batch_size=50))(jnp.arange(400))
    assert_unbiased(draws, eqx.filter_jit(gradient)().layers[1].weight)


class Residual(eqx.Module):
    """Channels first, statistics over the mapped batch."""

    convs: list
    norms: list
    pool: eqx.nn.MaxPool2d

    def __init__(self, key):
        keys = iter(jax.random.split(key, 4))
        sizes = (3, 8, 3), (8, 16, 3), (16, 16, 3), (8, 16, 1)
        self.convs = [
            eqx.nn.Conv2d(i, o, n, padding=n // 2, use_bias=False, key=next(keys))
            for i, o, n in sizes
        ]
        self.norms = [eqx.nn.BatchNorm(o, "batch", mode="batch") for _, o, _ in sizes]
        self.pool = eqx.nn.MaxPool2d(3, 2, padding=1)

    def __call__(self, x, state):
        conv, norm = self.convs, self.norms
        x, state = norm[0](conv[0](x), state)
        x = self.pool(jax.nn.relu(x))
        y, state = norm[1](conv[1](x), state)
        y, state = norm[2](conv[2](jax.nn.relu(y)), state)
        skip, state = norm[3](conv[3](x), state)
        return jax.nn.relu(y + skip).mean((1, 2)), state


@pytest.mark.slow
def test_batch_norms_of_channels_first():
    model, state = eqx.nn.make_with_state(Residual)(jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_array)
    x = jax.random.normal(jax.random.key(1), (16, 3, 16, 16))
    weight = jax.random.normal(jax.random.key(2), (16, 16))
    policy = jc.recipes.fused(bits=4, scale_source="range")

    def stock(params, state, x):
        model = eqx.combine(params, static)
        mapped = dict(in_axes=(0, None), out_axes=(0, None), axis_name="batch")
        return jax.vmap(model, **mapped)(x, state)

    def gradient(fn):
        return jax.grad(lambda params: (weight * fn(params, state, x)[0]).sum())(params)

    coded = jc.checkpoint(stock, policy)
    assert_same_bits(jax.jit(coded)(params, state, x), jax.jit(stock)(params, state, x))
    (units,) = [v for v in jc.plan(coded, params, state, x).values if v.op == "norm_act"]
    assert units.note == "3 operations"
    assert units.saved_bytes < units.exact_bytes / 5
    draw = jax.jit(lambda seed: gradient(jc.checkpoint(stock, policy, seed=seed)))
    draws = [jax.tree.leaves(draw(seed)) for seed in range(30)]
    for i, exact in enumerate(jax.tree.leaves(jax.jit(gradient, static_argnums=0)(stock))):
        error, chance = error_of_mean([d[i] for d in draws], exact)
        assert error < 2.2 * chance + 1e-4 * np.linalg.norm(exact)
