"""Bits by part: the least noise within the bytes of uniform bits."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxcomp as jc
from jaxcomp.planning import allocate
from jaxcomp.planning._allocate import _least_noise
from jaxcomp.planning._groups import coded
from jaxcomp.planning._noise import Noise
from tests.planning.small import BATCH, DATA, WIDTH, LinenNet, loss


def test_the_choice_is_the_best_of_all():
    rng = np.random.default_rng(0)
    names, widths = ["a", "b", "c", "d", "e", "f"], (2, 3, 4, 8)
    noise = Noise({4: dict(zip(names, [300.0, 1, 20, 1, 0.1, 0.01], strict=True))})
    sizes = rng.integers(10, 100, 6)
    declared = {w: {n: int(w * s) for n, s in zip(names, sizes, strict=True)} for w in widths}
    budget = sum(declared[4].values())
    found = _least_noise(names, declared, noise, budget)
    within = [
        dict(zip(names, map(coded, chosen), strict=True))
        for chosen in itertools.product(widths, repeat=6)
        if sum(declared[w][n] for n, w in zip(names, chosen, strict=True)) <= budget
    ]
    assert found == min(within, key=noise.total)
    assert len({*found.values()}) > 1


class Block(nnx.Module):
    def __init__(self, gain, rngs):
        self.gain = gain
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.gain * jnp.sin(self.linear(x))


class Net(nnx.Module):
    """The gradients of a block, and the noise of its codes, are as large as its gain."""

    def __init__(self, rngs):
        self.blocks = nnx.List(Block(gain, rngs) for gain in (10.0, *(0.1,) * 5))

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def residual_bytes(model, x):
    graphdef, state = nnx.split(model)
    return jc.memory.declared_residual_bytes(lambda s, x: loss(nnx.merge(graphdef, s), x), state, x)


def test_parts_that_matter_get_more_bits_in_no_more_bytes():
    model, x = Net(nnx.Rngs(0)), DATA[2]
    policy = allocate(loss, model, x, 4)
    compressed = [jc.compress(nnx.clone(model), p) for p in (policy, jc.recipes.automatic(4))]
    ours, uniform = (jc.check_gradients(loss, m, x, draws=6) for m in compressed)
    assert ours.noise_over_sgd < 0.75 * uniform.noise_over_sgd
    assert residual_bytes(compressed[0], x) <= residual_bytes(compressed[1], x)
    assert jc.Policy.from_json(policy.to_json()) == policy


@pytest.mark.slow
def test_the_gradient_may_be_of_adapters_alone():
    model, x = Net(nnx.Rngs(0)), DATA[2]
    for seed, block in enumerate(model.blocks):
        rngs = nnx.Rngs(seed)
        block.linear = nnx.LoRA(WIDTH, 4, WIDTH, base_module=block.linear, rngs=rngs)
        block.linear.lora_b[...] = jax.random.normal(rngs.params(), (4, WIDTH))
    policy = allocate(loss, model, x, 4, wrt=nnx.LoRAParam)
    noises = [
        jc.check_gradients(
            loss, jc.compress(nnx.clone(model), p), x, draws=6, wrt=nnx.LoRAParam
        ).noise_over_sgd
        for p in (policy, jc.recipes.automatic(4))
    ]
    assert noises[0] < noises[1]


@pytest.mark.slow
def test_a_function_has_the_parts_of_its_scopes():
    x = jax.random.normal(jax.random.key(1), (BATCH, WIDTH))
    params = LinenNet().init(jax.random.key(0), x)

    def of_params(params, x):
        return jnp.square(LinenNet().apply(params, x)).mean()

    policy = allocate(of_params, params, x, 4)
    noises = [
        jc.check_gradients(jc.checkpoint(of_params, p), params, x, draws=6).noise_over_sgd
        for p in (policy, jc.recipes.automatic(4))
    ]
    assert noises[0] <= 1.05 * noises[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 9}, r"bits=9: expected from 2 to 8 \(widths\)"),
        ({"bits": 2, "widths": (3, 4)}, r"bits=2: expected from 3 to 4 \(widths\)"),
        ({"widths": (4,)}, r"widths=\(4,\): expected at least two of \(2, 3, 4, 5, 6, 8\)"),
        ({"widths": (4, 7)}, r"widths=\(4, 7\): expected at least two of"),
        ({"batch": DATA[2][:30]}, "batch: expected arrays whose axis 0 is the same multiple of 4$"),
        ({"bits": math.nan}, "bits=nan: expected from 2 to 8"),
    ],
)
def test_bad_arguments_are_errors(arguments, message):
    given = dict(zip(("loss", "model", "batch"), DATA, strict=True))
    with pytest.raises(ValueError, match=message):
        allocate(**given | arguments)


def test_a_model_without_large_values_is_an_error():
    with pytest.raises(ValueError, match="nothing in it is large enough to be coded"):
        allocate(loss, nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jnp.ones((4, 4)))
