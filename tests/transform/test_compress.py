"""Flax's own models, unchanged inside, with what they store as a policy says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxcomp as jc
from jaxcomp import policies
from jaxcomp.memory import declared_residual_bytes
from tests.helpers import assert_close, assert_same_bits, assert_unbiased, normal


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.conv = nnx.Conv(width, width, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(self.norm(self.conv(x)) + x)


class Network(nnx.Module):
    """As users write them; its two blocks share a convolution."""

    def __init__(self, rngs):
        self.stem = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.blocks = nnx.List([Block(8, rngs), Block(8, rngs)])
        self.blocks[1].conv = self.blocks[0].conv
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.head = nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, x, *, scale=1.0, pool="mean"):
        x = nnx.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        x = nnx.avg_pool(x, (2, 2), (2, 2))
        return self.head(self.dropout(getattr(jnp, pool)(x, (1, 2)))) * scale


X = normal((4, 8, 8, 3))


def create(policy=None):
    model = Network(nnx.Rngs(0))
    return model if policy is None else jc.compress(model, policy)


@nnx.jit
def gradient(model, x):
    return nnx.value_and_grad(lambda model: jnp.sin(model(x, scale=2.0)).sum())(model)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_results_and_state_are_the_models_own(mode):
    ours, stock = create(jc.Quantize(bits=2)), create()
    for model in (ours, stock):
        getattr(model, mode)()
    call = nnx.jit(lambda model, x: model(x, scale=2.0, pool="max"))
    for _ in range(2):  # dropout's count goes on
        assert_same_bits(call(ours, X), call(stock, X))
    numbers = nnx.Not(nnx.RngKey)
    assert_close(nnx.state(ours, numbers), nnx.state(stock, numbers), 1e-6)


def test_structure_is_the_models_own():
    ours, stock = create(jc.Quantize(bits=2)), create()
    assert isinstance(ours, Network)
    assert ours.blocks[1].conv is ours.blocks[0].conv
    paths = [list(nnx.to_flat_state(nnx.state(model)).paths) for model in (ours, stock)]
    assert paths[0] == paths[1]
    again = nnx.merge(*nnx.split(ours))
    for model in (ours, again):
        model.dropout.deterministic = True
    assert_close(gradient(again, X), gradient(ours, X))


def test_exact_gives_the_stock_gradient():
    (value, ours), (expected, stock) = gradient(create(jc.Exact()), X), gradient(create(), X)
    assert_close(value, expected, 1e-6)
    assert_close(jax.tree.leaves(ours), jax.tree.leaves(stock))


def test_the_gradient_is_unbiased():
    """Over draws of the noise, which another value of an unused parameter redraws."""
    model = create(jc.Quantize(bits=1))
    model.unused = nnx.Param(jnp.zeros(()))
    model.dropout.deterministic = True
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def kernel(draw):
        drawn = jax.tree.map(lambda p: p if p.shape else draw, params)

        def loss(params):
            return jnp.sin(nnx.merge(graphdef, params, rest, copy=True)(X)).sum()

        return jax.grad(loss)(drawn)["stem"]["kernel"][...]

    draws = jax.jit(lambda d: jax.lax.map(kernel, d, batch_size=50))(jnp.arange(400.0))
    model = create(jc.Exact())
    model.dropout.deterministic = True
    exact = jax.grad(lambda w: _with_stem(model, w))(model.stem.kernel[...])
    assert_unbiased(draws, exact)


def _with_stem(model, kernel):
    model = nnx.clone(model)
    model.stem.kernel.set_value(kernel)
    return jnp.sin(model(X)).sum()


def test_it_stores_less_and_trains():
    def loss(params, graphdef, rest, x):
        return jnp.sum(nnx.merge(graphdef, params, rest, copy=True)(x) ** 2)

    def declared(model):
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        return declared_residual_bytes(
            functools.partial(loss, graphdef=graphdef, rest=rest, x=X), params
        )

    assert declared(create(jc.Quantize(bits=4))) < 0.25 * declared(create())

    model = create(jc.Quantize(bits=4))
    optimizer = nnx.Optimizer(model, optax.sgd(0.02), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, X)) for _ in range(40)]
    assert losses[-1] < 0.5 * losses[0]


def test_policies_see_the_modules():
    policy = policies.compress(jc.Quantize(bits=4), path="blocks/0(/.*)?")
    found = jc.plan(create(policy), X)
    coded = {value.path for value in found.values if value.decision.startswith("Quantize")}
    assert coded and all(path.startswith("blocks/0") for path in coded)
    assert {value.path for value in found.values} > coded
    with pytest.raises(ValueError, match=r"matches nothing.*paths: .*blocks/1/norm"):
        jc.plan(create(policies.compress(jc.Quantize(4), path="layers/.*")), X)
    with pytest.raises(ValueError, match=r"path='\(': not a regular expression"):
        policies.compress(jc.Quantize(4), path="(")


def test_by_default_small_values_are_exact():
    model = create()
    jc.compress(model)
    found = jc.plan(model, jax.ShapeDtypeStruct((64, 8, 8, 3), jnp.float32))
    large = {
        value.decision.startswith("Quantize") for value in found.values if value.role == "operand"
    }
    assert large == {True, False}
    for value in found.values:
        assert not value.decision.startswith("Quantize") or np.prod(value.shape) >= 2**14


def test_what_it_cannot_do_is_an_error():
    with pytest.raises(TypeError, match="expected a Flax NNX module that can be called"):
        jc.compress(lambda x: x)
    with pytest.raises(TypeError, match="policy='4 bits': expected a codec"):
        jc.compress(create(), "4 bits")
    with pytest.raises(ValueError, match="is compressed already"):
        jc.compress(create(jc.Quantize(4)))
    with pytest.raises(ValueError, match=r"expected what jaxcomp\.compress returned"):
        jc.plan(create(), X)
