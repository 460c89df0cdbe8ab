"""Attentions and LayerScale of any program, which save no codes."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxcomp as jc
from tests.helpers import slow


@pytest.fixture(autouse=True)
def as_users_write():
    """A mean of shape (features,) is subtracted as it is."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("stop", ["", "keep"])
def test_attention_saves_no_scores(stop):
    x = jax.random.normal(jax.random.key(1), (2, 128, 32))
    w = jax.random.normal(jax.random.key(0), (4, 32, 32)) / 32**0.5
    policy = jc.policies.from_spec("exact") if not stop else jc.recipes.automatic()
    if stop:
        policy = jc.Policy((jc.Rule("keep", op="attention", required=False),)) + policy

    def f(w, x):
        q, k, v = (jnp.sin(x @ w[i]).reshape(2, 128, 4, 8) for i in range(3))
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return (y.reshape(2, 128, 32) @ w[3]).sum()

    def scores(policy):
        plan = jc.plan(jc.checkpoint(f, policy), w, x)
        return [v for v in plan.values if v.op == "attention"], plan

    found, plan = scores(jc.recipes.automatic())
    assert [v.saved_bytes for v in found] == [0]
    assert plan.saved_bytes < 0.2 * plan.exact_bytes
    assert scores(policy)[0] == []
    # Exact queries, keys and values: only the other products' inputs have codes.
    gradient, exact = (
        jax.jit(jax.grad(g))(w, x) for g in (jc.checkpoint(f, jc.recipes.automatic()), f)
    )
    error = jnp.linalg.norm(gradient - exact) / jnp.linalg.norm(gradient)
    assert error < 0.05


@pytest.mark.parametrize(
    ("dtype", "has_bias"),
    [(jnp.float32, True), slow(jnp.float32, False), slow(jnp.bfloat16, True)],
)
def test_a_scale_of_features_saves_nothing(dtype, has_bias):
    shapes = {"x": (4, 64, 128), "up": (128, 256), "down": (256, 128), "scale": (128,)}
    keys = jax.random.split(jax.random.key(0), 5)
    given = {
        n: jax.random.normal(k, s, dtype) for k, (n, s) in zip(keys, shapes.items(), strict=False)
    }
    given |= {n: given[n] / 16 for n in ("up", "down")} | {"bias": jnp.ones(128, dtype)}

    def loss(given):
        y = jax.nn.gelu(given["x"] @ given["up"]) @ given["down"]
        y = (y + given["bias"] if has_bias else y) * given["scale"]
        return jnp.sum(jnp.sin(given["x"] + y).astype(jnp.float32))

    coded = jc.checkpoint(loss)
    values = coded.plan(given).values
    units = [v for v in values if v.op not in ("", "activation")]
    assert [(v.op, v.decision, v.saved_bytes) for v in units] == [
        ("scaled_linear", "not needed", 0)
    ]
    encoded = [v.op for v in values if v.decision.startswith("Quantize")]
    assert sorted(encoded) == ["", "activation"]  # the scaled product reads the activation's code
    alone = jc.memory.compiler_options()
    assert jax.jit(coded, compiler_options=alone)(given) == jax.jit(loss, compiler_options=alone)(
        given
    )

    def draw(seed):
        return jax.grad(jc.checkpoint(loss, seed=seed))(given)

    draws = jax.jit(lambda seeds: jax.lax.map(draw, seeds))(jnp.arange(64, dtype=jnp.uint32))
    exact = jax.jit(jax.grad(loss))(jax.tree.map(lambda a: a.astype(jnp.float32), given))
    for name, expected in exact.items():
        mean = draws[name].astype(jnp.float32).mean(0)
        error = jnp.linalg.norm(mean - expected) / jnp.maximum(jnp.linalg.norm(expected), 1e-6)
        # In bfloat16 the gradient of the scale is a sum over that of the weights, which is rounded.
        assert error < (0.02 if dtype == jnp.float32 else 0.06), (name, error)


def test_look_alikes_of_a_scale_are_left_alone():
    x, w = jnp.ones((64, 512)), jnp.ones((512, 512))

    def found(f):
        return [v.op for v in jc.checkpoint(f).plan(x, w).values if v.op]

    def read_twice(x, w):
        y = x @ w
        return jnp.sum(jnp.sin(y * w[0]) + y)

    assert found(read_twice) == []
    assert found(lambda x, w: jnp.sum(jnp.sin((x @ w) * x))) == []
    assert found(lambda x, w: jnp.sum(jnp.sin((x @ w) * 2.0))) == []
    assert found(lambda x, w: jnp.sum(jnp.sin((x @ w) * w[:64, :1]))) == []
    assert found(lambda x, w: jnp.sum(jnp.sin((x @ w) * w[0]))) == ["scaled_linear"]


def test_a_scale_of_a_product_whose_second_operand_has_a_code():
    w, x = (jax.random.normal(jax.random.key(i), (256, 256)) / 16 for i in range(2))
    scale = jnp.linspace(0.5, 2.0, 256)

    def f(w, x, scale):
        return jnp.sum(jnp.sin((w @ jax.nn.gelu(jnp.sin(x) @ x)) * scale))

    found, exact = (
        jax.jit(jax.grad(g, (0, 1, 2)))(w, x, scale)
        for g in (jc.checkpoint(f, "quantize:bits=8"), f)
    )
    for one, other in zip(found, exact, strict=True):
        assert jnp.linalg.norm(one - other) < 0.02 * jnp.linalg.norm(other)


def test_a_rule_keeps_the_attention_of_a_part_of_a_model():
    def attention():
        return nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0))

    model = nnx.Sequential(attention(), attention())
    kept = jc.Rule("keep", op="attention", path="layers/0", required=False)
    jc.compress(model, jc.Policy((kept,)) + jc.recipes.automatic())
    values = jc.plan(model, jnp.ones((8, 128, 32))).values
    assert [v.path for v in values if v.op == "attention"] == ["layers/1"]

    x = jnp.ones((8, 128, 32))
    alone = jc.Policy((jc.Rule("keep", op="attention"), jc.Rule("recompute")))
    jc.plan(jc.compress(attention(), alone), x)  # no codec: nothing is recognized, and all is kept
    coded = jc.Policy((jc.Rule(jc.Quantize(bits=4), op="attention"),)) + jc.recipes.automatic()
    with pytest.raises(ValueError, match="with 'keep' attention"):
        jc.plan(jc.compress(attention(), coded), x)


@pytest.mark.aot
def test_queries_in_groups_are_not_copied_in_every_iteration_on_a_tpu():
    def loss(x, wq, wk, wv, wo):
        q, k, v = ((x @ w).reshape(*x.shape[:2], -1, 64) for w in (wq, wk, wv))
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        return jnp.square((x + y @ wo).astype(jnp.float32)).sum()

    shapes = (8, 1024, 768), (768, 768), (768, 256), (768, 256), (768, 768)
    kinds = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    coded, plain = (
        jc.memory.analyze(jax.grad(f, (0, 1, 2, 3, 4)), *kinds, target="v5e").estimated_seconds
        for f in (jc.checkpoint(loss, "transformer:bits=4"), loss)
    )
    print(f"v5e, grouped queries: {1e3 * coded:.1f} ms, plain {1e3 * plain:.1f} ms")
    assert coded < plain
