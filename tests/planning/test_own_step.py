"""`compare(step, arguments, rows)`: without a step factory."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

import jaxcomp as jc

ROWS = ["plain", "remat", "quantize:bits=4"]
X = jnp.ones((1024, 64))


def make_state():
    rngs = nnx.Rngs(0)

    def block():
        return nnx.Sequential(
            nnx.Linear(64, 128, rngs=rngs), nnx.gelu, nnx.Linear(128, 64, rngs=rngs)
        )

    model = nnx.Sequential(block(), block())
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def loss(model, x):
    return jnp.square(model(x)).mean()


@nnx.jit
def train_step(model, optimizer, x):
    value, grads = nnx.value_and_grad(loss)(model, x)
    optimizer.update(model, grads)
    return value


@nnx.jit
def step_of_both(optimizer, x):
    value, grads = nnx.value_and_grad(loss)(optimizer.model, x)
    optimizer.update(grads)
    return value


def declared(table):
    return [row.report.declared_residual_bytes for row in table.rows]


def test_rows_are_those_of_a_factory_and_the_model_is_unchanged(monkeypatch):
    model, optimizer = make_state()
    table = jc.compare(train_step, (model, optimizer, X), [*ROWS, "accumulate:2"], target="cpu")
    assert type(model) is nnx.Sequential
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    without = jc.compare(train_step, (model, optimizer, X), ["plain"], target="cpu")
    told = "removes optimization barriers" in str(without)
    assert told == bool(jc.memory.compiler_options())
    *rows, split = table.rows
    assert split.error.startswith("micro-batches need a step factory")

    def make_step(transform, batch):
        model, optimizer = nnx.eval_shape(make_state)
        return train_step, (transform(model), optimizer, jax.ShapeDtypeStruct((batch, 64), "f4"))

    for row, other in zip(
        rows, jc.compare(make_step, ROWS, batch=1024, target="cpu").rows, strict=True
    ):
        same = other.report.to_dict() | {"compile_seconds": row.report.compile_seconds}
        assert row.report.to_dict() == same
        assert (row.batch, other.batch) == (None, 1024)
    both = nnx.ModelAndOptimizer(model, optax.adam(1e-3))
    inside = jc.compare(step_of_both, (both, X), ROWS, target="cpu")
    assert declared(inside) == [row.report.declared_residual_bytes for row in rows]
    assert not jc.policy_of(both.model)


def test_the_function_of_a_linen_state_is_compressed():
    net = linen.Sequential([linen.Dense(128), linen.gelu, linen.Dense(64), linen.gelu])
    params = net.init(jax.random.key(0), X)["params"]
    state = TrainState.create(apply_fn=net.apply, params=params, tx=optax.adam(1e-3))

    @jax.jit
    def step(state, x):
        def loss(params):
            return jnp.square(state.apply_fn({"params": params}, x)).mean()

        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    plain, remat, quantized = jc.compare(step, (state, X), ROWS, target="cpu").rows
    assert "the blocks of a function are not known" in remat.error
    assert 5 * quantized.report.declared_residual_bytes < plain.report.declared_residual_bytes
    assert state.apply_fn == net.apply


def test_other_steps_need_a_factory():
    plain, row = jc.compare(jnp.sin, (X,), ["plain", "exact"], target="cpu").rows
    assert plain.error is None
    assert "expected a Flax NNX model or a Linen TrainState among them" in row.error
    for arguments in ((["plain"],), (X, ["plain"]), ((X,),), ()):
        with pytest.raises(TypeError, match=r"expected compare\(make_step, rows, batch=...\)"):
            jc.compare(jnp.sin, *arguments, target="cpu")
    with pytest.raises(ValueError, match="largest_batch=True: expected a step factory"):
        jc.compare(jnp.sin, (X,), ["plain"], target="cpu", capacity="1GiB", largest_batch=True)
