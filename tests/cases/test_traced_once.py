"""One traced call whose arguments are differentiated differently: small programs of users."""

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

import jaxcomp as jc
from tests.helpers import distance, normal, slow

SIZE = 128
W = normal((SIZE, SIZE), seed=1) / 11
X, Z = normal((SIZE, SIZE), seed=2), normal((SIZE, SIZE), seed=3)


def _layer(w, x):
    return jnp.tanh(x @ w)


@pytest.mark.parametrize("around", [jax.jit, jax.checkpoint], ids=["jit", "checkpoint"])
@pytest.mark.parametrize("policy", [slow(jc.Exact()), jc.Quantize(8), "automatic"], ids=str)
def test_a_trained_and_a_frozen_call(around, policy):
    """As in distillation and in adversarial training."""

    def gradients(f):
        return jax.grad(lambda w, z: jnp.sum(f(w, X) + f(lax.stop_gradient(w), z)), (0, 1))(W, Z)

    got = gradients(around(jc.checkpoint(_layer, policy)))
    for one, expected in zip(got, gradients(_layer), strict=True):
        assert distance(one, expected) < 0.06  # automatic has 4 bits


def test_a_trained_and_a_frozen_call_of_a_model():
    def gradients(model):
        graphdef, state = nnx.split(model)
        f = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))

        def loss(state, z):
            return jnp.sum(f(state, X) + f(lax.stop_gradient(state), z))

        return jax.tree.leaves(jax.grad(loss, (0, 1))(state, Z))

    def model():
        return nnx.Sequential(nnx.Linear(SIZE, SIZE, rngs=nnx.Rngs(0)), jnp.tanh)

    pairs = zip(gradients(jc.compress(model())), gradients(model()), strict=True)
    assert all(distance(one, expected) < 0.1 for one, expected in pairs)


@pytest.mark.parametrize("around", [jax.jit, jax.checkpoint], ids=["jit", "checkpoint"])
def test_one_block_for_all_layers_whose_first_input_is_data(around):
    def gradient(block):
        return jax.grad(lambda ws: block(ws[1], block(ws[0], X)).sum())([W, 2 * W])

    got = gradient(around(jc.checkpoint(_layer, jc.Quantize(8))))
    assert distance(got, gradient(_layer)) < 0.01


class Block(nnx.Module):
    """A block of a transformer without its attention."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(64, rngs=rngs)
        self.up, self.down = nnx.Linear(64, 256, rngs=rngs), nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("around", [slow(nnx.jit), nnx.remat], ids=["jit", "remat"])
def test_compressed_blocks_in_transformations_of_flax(around):
    x = normal((512, 64))

    def gradient(blocks):
        call = around(lambda block, x: block(x))

        def loss(blocks):
            y = x
            for block in blocks:
                y = call(block, y)
            return jnp.mean(jnp.sin(y))

        return nnx.to_pure_dict(nnx.grad(loss)(blocks))

    def blocks():
        rngs = nnx.Rngs(0)
        return [Block(rngs) for _ in range(2)]

    got = gradient(nnx.List(map(jc.compress, blocks())))
    assert distance(got, gradient(nnx.List(blocks()))) < 0.1


@pytest.mark.parametrize("policy", [slow(jc.Exact()), jc.Quantize(8)], ids=str)
def test_the_checkpointed_loop_of_equinox(policy):
    def gradient(f):
        def loss(w):
            def step(carry):
                return carry[0] + 1, f(w, carry[1])

            options = {"max_steps": 8, "kind": "checkpointed"}
            start = jnp.int32(0), X
            return eqxi.while_loop(lambda carry: carry[0] < 5, step, start, **options)[1].sum()

        return jax.grad(loss)(W)

    got = gradient(jc.checkpoint(_layer, policy))
    assert distance(got, gradient(jax.checkpoint(_layer))) < 0.02


PRODUCTS = {
    "operation": lambda w, x: jc.ops.dot_general(
        x, w, (((1,), (0,)), ((), ())), codec=jc.Quantize(4)
    ),
    "function": jc.checkpoint(lambda w, x: (x + 1) @ w, jc.Quantize(4), coded_argnums=1),
}
AROUND = {
    "none": lambda f: f,
    "jit": jax.jit,
    "vmap": lambda f: lambda w, x: jax.vmap(f, (None, 0))(w, x[None]),
    "scan": lambda f: lambda w, x: lax.scan(lambda x, _: (f(w, x), None), x, None, length=2)[0],
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_only_the_gradient_of_a_weight_costs_a_code(product, around):
    f = around(product)

    def codes(of, argument):
        saved = jax.eval_shape(lambda argument: jax.vjp(of, argument)[1], argument)
        return [leaf.shape for leaf in jax.tree.leaves(saved) if leaf.dtype == jnp.uint4]

    assert codes(lambda w: f(w, X), W)
    assert not codes(lambda x: f(W, x), X)
