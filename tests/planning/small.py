"""Small models, of which steps are planned."""

import functools

import jax
import jax.numpy as jnp
from flax import linen, nnx

import jaxcomp as jc

WIDTH, BATCH, DEPTH = 64, 2048, 3


class Block(nnx.Module):
    def __init__(self, rngs):
        self.mlp = nnx.Sequential(
            nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs),
            nnx.gelu,
            nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs),
        )
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.mlp(self.norm(x))


class Net(nnx.Module):
    def __init__(self, depth, rngs):
        self.blocks = nnx.List(Block(rngs) for _ in range(depth))
        self.head = nnx.Linear(WIDTH, 8, rngs=rngs)

    def call_block(self, block, x):
        return block(x)

    def __call__(self, x):
        for block in self.blocks:
            x = self.call_block(block, x)
        return self.head(x)


class RematNet(Net):
    """A model whose author rematerialises each block."""

    def call_block(self, block, x):
        return nnx.remat(lambda block, x: block(x))(block, x)


def make_step(transform, batch, depth=DEPTH, net=Net):
    model = transform(nnx.eval_shape(lambda: net(depth, nnx.Rngs(0))))
    return step_of(transform, model), (model, jax.ShapeDtypeStruct((batch, WIDTH), jnp.float32))


def step_of(transform, model):
    graphdef, _ = nnx.split(model)

    def step(model, x):
        def gradient(total, x):
            def loss(state):
                return jnp.square(nnx.merge(graphdef, state)(x)).mean()

            return jax.tree.map(jnp.add, total, jax.grad(loss)(state)), None

        _, state = nnx.split(model)
        zeros = jax.tree.map(jnp.zeros_like, state)
        if transform.micro_batches == 1:
            return gradient(zeros, x)[0]
        return jax.lax.scan(gradient, zeros, x.reshape(transform.micro_batches, -1, WIDTH))[0]

    return jax.jit(step, compiler_options=jc.memory.compiler_options())


def loss(model, x):
    return jnp.square(model(x)).mean()


DATA = (
    loss,
    nnx.jit(lambda: Net(DEPTH, nnx.Rngs(0)))(),
    jax.random.normal(jax.random.key(0), (256, WIDTH)),
)


def total_bytes(strategy, depth=DEPTH, target="cpu"):
    step, arguments = make_step(strategy, BATCH, depth)
    return jc.memory.analyze(step, *arguments, target=target).total_bytes


@functools.cache
def plain_bytes(depth=DEPTH):
    return total_bytes(jc.planning.Strategy.parse("plain"), depth)


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        for i in range(DEPTH):
            y = linen.LayerNorm(name=f"norm_{i}")(x)
            y = linen.Dense(4 * WIDTH, name=f"up_{i}")(y)
            x = x + linen.Dense(WIDTH, name=f"down_{i}")(jax.nn.gelu(y))
        return linen.Dense(8, name="head")(x)


def of_linen(transform, batch):
    model = LinenNet()
    x = jax.ShapeDtypeStruct((batch, WIDTH), jnp.float32)
    apply = transform(model.apply)
    step = jax.grad(lambda variables, x: jnp.square(apply(variables, x)).mean())
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    return jax.jit(step, compiler_options=jc.memory.compiler_options()), (variables, x)
