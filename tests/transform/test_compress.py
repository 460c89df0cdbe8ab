"""Flax's own models, unchanged inside, with what they store as a policy says."""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jaxcomp as jc
from jaxcomp.memory import declared_residual_bytes
from tests.helpers import (
    assert_close,
    assert_same_bits,
    assert_unbiased,
    distance,
    normal,
    shard,
    without_type_checks,
)


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
    """A codec is for all values here, which are small."""
    if isinstance(policy, jc.Codec):
        policy = jc.Policy((jc.Rule(policy),))
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
    exact = jax.jit(jax.grad(lambda w: _with_stem(model, w)))(model.stem.kernel[...])
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


def test_rules_see_the_modules():
    policy = jc.Policy((jc.Rule(jc.Quantize(bits=4), path="blocks/0(/.*)?"),))
    found = jc.plan(create(policy), X)
    coded = {value.path for value in found.values if value.decision.startswith("Quantize")}
    assert coded and all(path.startswith("blocks/0") for path in coded)
    assert {value.path for value in found.values} > coded
    with pytest.raises(ValueError, match=r"matches nothing.*paths: .*blocks/1/norm"):
        jc.plan(create(jc.Policy((jc.Rule(jc.Quantize(4), path="layers/.*"),))), X)


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


def test_layers_of_both_kinds_in_one_model():
    """The call is traced around layers that have codecs, and layers of Flax have those of rules."""

    class Mixed(nnx.Module):
        def __init__(self):
            self.first = jc.nn.Linear(8, 8, rngs=nnx.Rngs(0))
            self.second = nnx.Linear(8, 8, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.second(nnx.relu(self.first(x)))

    x = normal((64, 8))
    of_all = jc.plan(jc.compress(Mixed(), jc.Policy((jc.Rule(jc.Quantize(2), op="dot"),))), x)
    assert [value.path for value in of_all.values if value.op == "dot"] == ["second"]
    coded = jc.Rule(jc.Quantize(2), op="dot", path="first")
    layers_only = jc.plan(jc.compress(Mixed(), jc.Policy((coded,))), x)
    assert {v.role: v.decision for v in layers_only.values}["operand"] == "exact"
    both = jc.Policy((coded, jc.Rule(jc.Quantize(4), roles=("operand",))))
    model = jc.compress(Mixed(), both)
    assert model.first.codec == jc.Quantize(2)
    decisions = {value.role: value.decision for value in jc.plan(model, x).values}
    assert decisions["operand"].startswith("Quantize(bits=4")
    assert jc.plan(model, x).saved_bytes < layers_only.saved_bytes
    assert_same_bits(jax.jit(model)(x), jax.jit(Mixed())(x))


def test_parameters_may_be_sharded():
    """As in FSDP, on a mesh with automatic axes.

    The shapes are ones for which the sharded step has the bits of one device. With layers of
    64 x 64 and 256 rows it has not, and gradients differ by as much as two draws of the noise.
    """

    class MLP(nnx.Module):
        def __init__(self):
            self.norm = nnx.LayerNorm(64, rngs=nnx.Rngs(0))
            self.up = nnx.Linear(64, 256, rngs=nnx.Rngs(1))
            self.down = nnx.Linear(256, 64, rngs=nnx.Rngs(2))

        def __call__(self, x):
            return self.down(nnx.gelu(self.up(self.norm(x))))

    graphdef, params = nnx.split(jc.compress(MLP(), jc.Quantize(bits=4)))
    x = normal((512, 64))

    @jax.jit
    def gradients(params, x):
        return jax.grad(lambda params: jnp.mean(nnx.merge(graphdef, params)(x) ** 2))(params)

    sharded = jax.tree.map(shard, params)
    assert_close(gradients(sharded, shard(x)), gradients(params, x))


def test_a_model_may_be_called_twice_in_one_loss():
    """Its second call takes the state of the first, such as the count of dropout's numbers."""
    x = normal((64, 16))

    def loss(model):
        return jnp.mean(model(x) * model(x + 1))

    def siamese():
        rngs = nnx.Rngs(0)
        first, last = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 4, rngs=rngs)
        return nnx.Sequential(first, nnx.Dropout(0.5, rngs=rngs), nnx.relu, last)

    ours, stock = jc.compress(siamese(), jc.Policy((jc.Rule(jc.Quantize(8)),))), siamese()
    (value, gradient), (expected, exact) = map(nnx.jit(nnx.value_and_grad(loss)), (ours, stock))
    assert_close(value, expected)
    assert_close(jax.tree.leaves(gradient), jax.tree.leaves(exact), 0.05)


def test_it_can_be_copied_pickled_and_saved(tmp_path):
    model = create(jc.Quantize(bits=2))
    model.dropout.deterministic = True
    expected = gradient(model, X)
    copies = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model), nnx.clone(model)]
    graphdef, state = pickle.loads(pickle.dumps(nnx.split(model)))
    for again in (*copies, nnx.merge(graphdef, state)):
        assert type(again) is type(model)
        assert_same_bits(gradient(again, X), expected)

    stock = create()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.to_pure_dict(nnx.state(model, nnx.Param)))
        checkpointer.wait_until_finished()
        target = nnx.to_pure_dict(nnx.state(stock, nnx.Param))
        restored = checkpointer.restore(tmp_path / "state", target)
    nnx.update(stock, restored)
    assert_same_bits(nnx.state(stock, nnx.Param), nnx.state(model, nnx.Param))


def test_uncompress_gives_the_stock_model_back():
    model = create(jc.Quantize(bits=2))
    assert type(jc.uncompress(model)) is Network
    assert jc.plan(model, X).saved_bytes == jc.plan(create(), X).saved_bytes
    for tree in (model, create()):
        tree.dropout.deterministic = True
    assert_same_bits(gradient(model, X), gradient(_without_dropout(), X))


def _without_dropout():
    model = create()
    model.dropout.deterministic = True
    return model


def test_what_it_cannot_do_is_an_error():
    with without_type_checks():
        with pytest.raises(TypeError, match="expected a Flax NNX module"):
            jc.compress(lambda x: x)
        with pytest.raises(TypeError, match="policy=4: expected a jaxcomp"):
            jc.compress(create(), 4)
    with pytest.raises(ValueError, match="spec='4 bits': unknown codec or recipe '4 bits'"):
        jc.compress(create(), "4 bits")
    with pytest.raises(ValueError, match="model=Network: it is compressed already"):
        jc.compress(create(jc.Quantize(4)), jc.Quantize(4))
    with pytest.raises(ValueError, match="its module layers/0 is compressed already"):
        jc.compress(nnx.Sequential(create(jc.Quantize(4)), jnp.sin), jc.Quantize(4))

    class Silent(nnx.Module):
        pass

    with pytest.raises(TypeError, match="model of type Silent: expected one that can be called"):
        jc.compress(Silent())


class Cache(nnx.Module):
    def __init__(self) -> None:
        self.total = nnx.Variable(jnp.zeros(8))
        self.calls = nnx.Variable(jnp.int32(0))


class Caching(nnx.Module):
    """A model that takes a cache and keys, and writes the cache."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(8, 64, rngs=rngs), nnx.Linear(64, 8, rngs=rngs)
        self.drop = nnx.Dropout(0.5)

    def __call__(self, x: jax.Array, cache: Cache, *, rngs: nnx.Rngs) -> jax.Array:
        y = self.down(self.drop(jax.nn.gelu(self.up(x)), rngs=rngs))
        cache.total[...] += y.sum(0)
        cache.calls[...] += 1
        return y


def test_modules_as_arguments_are_updated() -> None:
    x = jnp.ones((256, 8))

    def loss(model: Caching, cache: Cache, rngs: nnx.Rngs) -> jax.Array:
        y = model(x, cache, rngs=rngs)
        return jnp.square(model(y, cache, rngs=rngs)).mean() + cache.total[...].sum()

    found = []
    for policy in (None, "exact", jc.Quantize(bits=8)):
        model, cache, rngs = Caching(nnx.Rngs(0)), Cache(), nnx.Rngs(1)
        if policy is not None:
            jc.compress(model, policy)
        gradient = nnx.jit(nnx.grad(loss))(model, cache, rngs)
        found.append((gradient, cache.total[...], cache.calls[...], rngs.dropout.count[...]))
    stock, exact, coded = found
    assert stock[2] == 2
    for one in (exact, coded):
        assert_same_bits(one[1:], stock[1:])
    of_exact, of_coded, of_stock = (jax.tree.leaves(one[0]) for one in (exact, coded, stock))
    assert_close(of_exact, of_stock)
    assert 0 < distance(of_coded, of_stock) < 0.02
    assert (
        0
        < distance(
            *(jnp.concatenate([a.ravel() for a in jax.tree.leaves(g[0])]) for g in (coded, stock))
        )
        < 0.02
    )


def test_an_argument_that_gets_new_variables() -> None:
    class Growing(Caching):
        def __call__(self, x: jax.Array, cache: Cache, *, rngs: nnx.Rngs) -> jax.Array:
            cache.last = nnx.Variable(x)
            return super().__call__(x, cache, rngs=rngs)

    model = jc.compress(Growing(nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"argument of type Cache: the call .* adds or removes"):
        model(jnp.ones((256, 8)), Cache(), rngs=nnx.Rngs(1))


@pytest.mark.parametrize("transform", [nnx.jit, nnx.grad])
def test_compressed_in_a_transformation_of_nnx(transform) -> None:
    """A transformation of NNX compares the classes before and after it."""
    model, x = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 4))
    outside = (
        r"Linear'> of jaxcomp \(call jaxcomp.compress and uncompress outside of nnx.jit, nnx.gra"
    )
    with pytest.raises(ValueError, match=outside):
        transform(lambda model: jc.compress(model)(x).sum())(model)
    transform(lambda model: jc.compress(nnx.clone(model))(x).sum())(model)
