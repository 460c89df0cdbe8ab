"""`compress` of models whose layers are under Flax's `scan`."""

import re

import jax
import jax.numpy as jnp
from flax import nnx

import jaxcomp as jc
from tests.helpers import distance, normal, only

CODEC = jc.Quantize(bits=4)


class Stack(nnx.Module):
    """Layers under Flax's `scan`, as its users write them."""

    def __init__(self):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def create(rngs):
            return nnx.Linear(64, 64, rngs=rngs)

        self.layers = create(nnx.Rngs(0))

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return x + jax.nn.gelu(layer(x))

        return run(x, self.layers)


class Net(nnx.Module):
    """Such a stack and a head."""

    def __init__(self):
        self.stack = Stack()
        self.head = nnx.Linear(64, 4, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.head(self.stack(x))


def test_compress_sees_the_layers_under_a_scan():
    x = normal((512, 64))
    model, stock = jc.compress(Net()), Net()
    inside = [v for v in jc.plan(model, x).values if v.note.startswith("3 iterations")]
    assert {v.role for v in inside} == {"input", "derivative"}
    assert all(re.match("Quantize", v.decision) for v in inside)
    assert {v.path for v in inside if v.role == "derivative"} == {"stack"}

    def loss(model):
        return jnp.mean(model(x) ** 2)

    got, expected = (nnx.to_pure_dict(nnx.jit(nnx.grad(loss))(m)) for m in (model, stock))
    assert 1e-3 < distance(got, expected) < 0.2
    found = jc.plan(jc.compress(Net(), only(CODEC, path="stack")), x)
    coded = {(v.role, v.shape) for v in found.values if v.decision == str(CODEC)}
    assert coded == {("derivative", (3, 512, 64)), ("operand", (512, 64))}
