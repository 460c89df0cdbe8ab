"""Names of modules in compiled programs, and paths in plans and timelines."""

import re

import jax
import jax.numpy as jnp
from flax import linen, nnx

import jaxcomp as jc
from jaxcomp.memory import timeline
from jaxcomp.memory._origin import split_op_name

X = jax.ShapeDtypeStruct((512, 64), jnp.float32)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(64, rngs=rngs)
        self.up = nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, x):
        with jax.named_scope("mlp"):
            return x + jnp.sin(self.up(self.norm(x)))


class Net(nnx.Module):
    """Lists inside of lists, and a layer that another one's call uses."""

    def __init__(self, rngs):
        self.stages = nnx.List(nnx.List(Block(rngs) for _ in range(2)) for _ in range(2))

    def __call__(self, x):
        for stage in self.stages:
            for block in stage:
                x = block(x)
        return x


class Outer(nnx.Module):
    """A compressed model as a part of another one."""

    def __init__(self, rngs):
        self.body = jc.compress(Net(rngs), "quantize:bits=4")
        self.head = nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.cos(self.body(x)))


def op_names(fn, *args):
    text = jax.jit(jax.grad(lambda *args: fn(*args).sum())).lower(*args).compile().as_text()
    return set(re.findall(r'op_name="([^"]*)"', text))


def test_modules_have_readable_names_in_hlo_plan_and_timeline():
    model = jc.compress(Net(nnx.Rngs(0)), "quantize:bits=4")
    graphdef, params = nnx.split(model)
    names = op_names(lambda params, x: nnx.merge(graphdef, params)(x), params, X)
    assert {"stages/0/1/mlp/norm", "stages/1/1/mlp/up"} <= {split_op_name(n)[0] for n in names}
    assert not [name for name in names if re.search(r"[0-9a-f]{8}|module", name)]
    paths = {value.path for value in jc.plan(model, X).values}
    blocks = [f"stages/{i}/{j}" for i in range(2) for j in range(2)]
    assert paths == {path for block in blocks for path in (f"{block}/norm", block)}

    def step(params, x):
        return jax.grad(lambda params: nnx.merge(graphdef, params)(x).sum())(params)

    scopes = {buffer.origin.scope for buffer in timeline(step, params, X, target="cpu").buffers}
    assert "stages/1/1/mlp/up" in scopes


def test_paths_of_a_compressed_part_begin_with_its_own():
    paths = [value.path for value in jc.plan(Outer(nnx.Rngs(0)), X).values]
    assert "body/stages/0/1/norm" in paths
    assert all(path == "" or path.startswith("body") for path in paths)


def test_scopes_of_linen_stay_as_they_are():
    class Stock(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(64)(jnp.sin(linen.Dense(64)(x)))

    def scopes(fn):
        names = op_names(fn, jax.eval_shape(model.init, jax.random.key(0), X), X)
        return {split_op_name(name) for name in names if "Dense" in name}

    model = Stock()
    assert scopes(jc.checkpoint(model.apply, "quantize:bits=4")) >= scopes(model.apply)
