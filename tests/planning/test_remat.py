import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxcomp import Cast, Quantize, memory
from jaxcomp.planning._remat import encode_boundaries, remat_blocks
from tests.helpers import assert_close, assert_same_bits, normal

X = normal((8, 4))


class Block(nnx.Module):
    """Takes a switch, an optional array and a keyword; counts its calls."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x, double, shift=None, *, power=1):
        self.calls[...] += 1
        y = jnp.sin(self.norm(self.linear(x)))
        y = y if shift is None else y + shift
        return (2 * y if double else y) ** power


class Net(nnx.Module):
    def __init__(self):
        self.blocks = nnx.List(Block(nnx.Rngs(i)) for i in range(3))

    def __call__(self, x):
        x = self.blocks[0](x, True)
        x = self.blocks[1](x, False, jnp.ones(4).reshape(1, 4))
        return self.blocks[2](x, double=True, shift=None, power=3)


def gradient(model):
    return nnx.jit(nnx.grad(lambda model, x: model(x).sum()))(model, X)


def test_values_gradients_state_and_paths_are_those_of_the_model():
    plain, rematted = Net(), remat_blocks(Net())
    assert_close(gradient(rematted), gradient(plain))
    assert_same_bits(nnx.state(rematted, nnx.Variable), nnx.state(plain, nnx.Variable))
    assert [int(block.calls[...]) for block in rematted.blocks] == [1, 1, 1]
    assert isinstance(rematted.blocks[0], Block)
    names = [type(m).__name__ for _, m in nnx.iter_modules(rematted)]
    assert names == [type(m).__name__ for _, m in nnx.iter_modules(plain)]


def test_a_block_is_differentiated_at_what_its_input_is_decoded_to():
    codec = Cast("bfloat16")

    def decoded(x):
        return codec.decode(codec.encode(x))

    class Linear(nnx.Module):
        def __init__(self):
            self.blocks = nnx.List([nnx.Linear(4, 4, rngs=nnx.Rngs(0))])

        def __call__(self, x):
            return jnp.sin(self.blocks[0](x))

    plain, coded = Linear(), encode_boundaries(Linear(), codec)
    assert_same_bits(jax.jit(coded)(X), jax.jit(plain)(X))
    kernel, bias = plain.blocks[0].kernel[...], plain.blocks[0].bias[...]
    g = jnp.cos(plain.blocks[0](X))
    found = gradient(coded).blocks[0]
    assert_close((found.kernel[...], found.bias[...]), (decoded(X).T @ g, g.sum(0)))
    dx = jax.grad(lambda x: coded(x).sum())(X)
    assert_close(dx, g @ kernel.T)
    assert bias.shape == (4,)


def test_parameters_are_the_same_on_all_devices_inside_of_shard_map():
    class Stack(nnx.Module):
        def __init__(self):
            self.blocks = nnx.List([nnx.Linear(4, 4, rngs=nnx.Rngs(0))])

        def __call__(self, x):
            return jnp.sin(self.blocks[0](x))

    graphdef, params = nnx.split(encode_boundaries(Stack(), Quantize(bits=2)))
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(params, x):
        return nnx.merge(graphdef, params)(x).sum()

    def total(params, x):
        return jax.lax.psum(local(params, x), "batch")

    specs = {"in_specs": (jax.P(), jax.P("batch")), "out_specs": jax.P()}
    mapped = jax.shard_map(jax.grad(total), mesh=mesh, **specs)
    lanes = jax.vmap(jax.grad(local), (None, 0))(params, X.reshape(8, 1, 4))
    expected = jax.tree.map(lambda a: a.sum(0), lanes)
    assert_close(jax.jit(mapped)(params, X), expected, 1e-5)


def test_state_of_blocks_with_encoded_inputs_changes():
    plain, coded = Net(), encode_boundaries(Net(), Quantize(bits=4))
    gradient(coded)
    gradient(plain)
    assert_close(nnx.state(coded, nnx.Variable), nnx.state(plain, nnx.Variable))


def test_a_block_may_take_integers_alone():
    class Embedded(nnx.Module):
        def __init__(self):
            self.blocks = nnx.List(
                [nnx.Embed(8, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 4, rngs=nnx.Rngs(1))]
            )

        def __call__(self, tokens):
            return self.blocks[1](self.blocks[0](tokens))

    model, tokens = encode_boundaries(Embedded(), Quantize(bits=8)), jnp.arange(8)
    found = nnx.grad(lambda model: (model(tokens) ** 2).sum())(model)
    expected = nnx.grad(lambda model: (model(tokens) ** 2).sum())(Embedded())
    assert_close(jax.tree.leaves(found), jax.tree.leaves(expected), 0.02)


def test_each_block_is_computed_again():
    def flops(model):
        step = nnx.jit(nnx.grad(lambda model, x: model(x).sum()))
        return memory.analyze(step, model, X, target="cpu").flops

    product = 2 * 8 * 4 * 4
    assert flops(remat_blocks(Net())) - flops(Net()) == 3 * product


def test_policy_keeps_products():
    policy = jax.checkpoint_policies.dots_saveable
    step = nnx.jit(nnx.grad(lambda model, x: model(x).sum()))
    model = remat_blocks(Net(), policy)
    again = memory.analyze(step, model, X, target="cpu").flops
    assert again == memory.analyze(step, Net(), X, target="cpu").flops


def test_only_the_outermost_list_counts():
    inner = [nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in range(2)]
    model = nnx.Sequential(nnx.Sequential(*inner), np.tanh)
    remat_blocks(model)
    assert type(model.layers[0]) is not nnx.Sequential
    assert type(model.layers[0].layers[0]) is nnx.Linear


def test_a_shared_block_is_changed_once():
    block = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    model = remat_blocks(nnx.Sequential(block, block))
    assert model.layers[0] is model.layers[1]
    assert type(block).__mro__[1] is nnx.Linear


def test_a_model_without_lists_is_an_error():
    with pytest.raises(ValueError, match=r"model=Linear: expected one with its blocks in a list"):
        remat_blocks(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))


def test_blocks_are_found_where_users_put_them():
    class Residual(nnx.Module):
        def __init__(self):
            self.up, self.down = (nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(2))

        def __call__(self, x):
            return x + self.down(jnp.sin(self.up(x)))

    class Stages(nnx.Module):
        def __init__(self):
            self.lists = nnx.List(nnx.List(Residual() for _ in range(2)) for _ in range(2))
            self.layer1 = nnx.List(Residual() for _ in range(2))
            self.layer2 = nnx.Sequential(Residual(), Residual())
            self.named = nnx.List([nnx.Dict(attention=Residual(), mlp=Residual())])

        def __call__(self, x):
            named = self.named[0]
            for stage in (*self.lists, self.layer1, (named["attention"], named["mlp"])):
                for block in stage:
                    x = block(x)
            return self.layer2(x)

    class Attributes(nnx.Module):
        def __init__(self):
            self.block1, self.block2 = Residual(), Residual()

    plain, rematted = Stages(), remat_blocks(Stages())
    assert_close(gradient(rematted), gradient(plain))
    step = nnx.jit(nnx.grad(lambda model, x: model(x).sum()))
    blocks = 10  # each saves its input; the first one's is an argument
    saved = memory.declared_residual_bytes(step, rematted, X)
    assert saved == (blocks - 1) * X.nbytes < memory.declared_residual_bytes(step, plain, X)
    with pytest.raises(ValueError, match=r"its modules are block1, block2\. Put the blocks in"):
        remat_blocks(Attributes())
