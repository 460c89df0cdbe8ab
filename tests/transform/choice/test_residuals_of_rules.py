"""Residuals of `jax.custom_vjp` functions: exact by default, encoded by a rule that names them."""

import jax
import jax.numpy as jnp
import pytest

import jaxcomp as jc
from jaxcomp.memory._tracing import inner_jaxprs
from jaxcomp.policies import Policy, Rule
from tests.helpers import assert_close, distance, normal, only, slow

NEAREST = jc.Quantize(bits=4, rounding="nearest")
WEIGHTS = 0.3 * normal((3, 16, 16))
X = normal((4, 64, 16), seed=1)


def _probabilities(q, k):
    return jax.nn.softmax(q @ k.mT)


@jax.custom_vjp
def attention(q, k, v):
    return _probabilities(q, k) @ v


def _forward(q, k, v):
    largest = (q @ k.mT).max(-1)  # what a kernel would save beside its operands
    return attention(q, k, v), (q, k, v, largest)


def _backward(residual, cotangent):
    q, k, v, largest = residual
    p = jnp.exp(q @ k.mT - largest[..., None])
    p /= p.sum(-1, keepdims=True)
    of_p = cotangent @ v.mT
    of_scores = p * (of_p - (of_p * p).sum(-1, keepdims=True))
    return of_scores @ k, of_scores.mT @ q, p.mT @ cotangent


attention.defvjp(_forward, _backward)


def loss(weights, x):
    with jax.named_scope("attention"):
        y = attention(x @ weights[0], x @ weights[1], x @ weights[2])
    return jnp.square(y).sum()


def scanned(weights, x):
    def block(x, w):
        return x + attention(x @ w[0], x @ w[1], x @ w[2]), None

    return jnp.square(jax.lax.scan(block, x, jnp.stack([weights, weights]))[0]).sum()


def of_residuals(action, **conditions):
    return only(action, op="custom_vjp", **conditions)


def products(jaxpr):
    return sum(e.primitive.name == "dot_general" for e in jaxpr.eqns) + sum(
        products(inner) for e in jaxpr.eqns for inner in inner_jaxprs(e)
    )


@pytest.mark.parametrize(
    ("policy", "fn"),
    [
        (jc.Exact(), loss),
        (jc.Quantize(bits=4), scanned),
        ("automatic", loss),
        slow(jc.Exact(), scanned),
        slow(jc.Quantize(bits=4), loss),
        slow("automatic", scanned),
    ],
)
def test_the_rule_is_evaluated_once(fn, policy):
    """Its products of residuals alone are made once, and not for each reader."""
    policy = jc.recipes.automatic() if policy == "automatic" else policy
    plain, ours = (
        products(jax.make_jaxpr(jax.grad(f))(WEIGHTS, X).jaxpr)
        for f in (fn, jc.checkpoint(fn, policy))
    )
    assert ours == plain
    assert_close(jax.grad(jc.checkpoint(fn, jc.Exact()))(WEIGHTS, X), jax.grad(fn)(WEIGHTS, X))


def test_other_rules_keep_residuals_exact():
    plan = jc.plan(jc.checkpoint(loss, jc.Quantize(bits=4)), WEIGHTS, X)
    residuals = [value for value in plan.values if value.role == "residual"]
    assert [value.decision for value in residuals] == ["exact"] * 3
    assert all("Rule(codec, op='custom_vjp') encodes it" in value.note for value in residuals)


def test_a_rule_encodes_residuals():
    """The gradient is what the function's own rule makes of decoded residuals."""
    coded = jc.checkpoint(loss, of_residuals(NEAREST))
    plan = jc.plan(coded, WEIGHTS, X)
    by_role = {value.role: value for value in plan.values if value.role != "operand"}
    assert by_role["residual"].decision == str(NEAREST)
    assert by_role["residual"].note.startswith("biased: the rule of a jax.custom_vjp function")
    assert by_role["statistic"].decision == "exact"  # the largest score of each row

    operands = [X @ w for w in WEIGHTS]
    *_, largest = _forward(*operands)[1]
    decoded = [NEAREST.decode(NEAREST.encode(q, jnp.uint32(0))) for q in operands]
    of_operands = _backward((*decoded, largest), 2 * attention(*operands))
    expected = jnp.stack([jnp.einsum("bsi,bsj->ij", X, g) for g in of_operands])
    got = jax.jit(jax.grad(coded))(WEIGHTS, X)
    assert_close(got, expected)
    assert distance(got, jax.grad(loss)(WEIGHTS, X)) > 0.01


@pytest.mark.parametrize(
    "wrap", [jax.jit, jax.checkpoint, slow(lambda f: f)], ids=["jit", "remat", "no"]
)
def test_residuals_in_loops(wrap):
    @wrap
    def block(x, w):
        return x + attention(x @ w[0], x @ w[1], x @ w[2]) / 8, None

    def fn(weights, x):
        return jnp.square(jax.lax.scan(block, x, jnp.stack([weights, weights]))[0]).sum()

    policy = Policy((*of_residuals(jc.Quantize(bits=8)).rules, *only(jc.Quantize(bits=8)).rules))
    coded = jc.checkpoint(fn, policy)
    exact = jax.grad(fn)(WEIGHTS, X)
    assert 0 < distance(jax.grad(coded)(WEIGHTS, X), exact) < 0.03
    decisions = [v.decision for v in jc.plan(coded, WEIGHTS, X).values if v.role == "residual"]
    assert decisions == [str(jc.Quantize(bits=8))] * 3


def test_paths_types_and_sizes_of_residuals():
    def coded(**conditions):
        policy = of_residuals(jc.Quantize(bits=4), **conditions)
        return jc.plan(jc.checkpoint(loss, policy), WEIGHTS, X)

    for conditions in ({"path": "attention"}, {"dtypes": ["float32"]}, {"min_size": 4096}):
        assert sum(value.role == "residual" for value in coded(**conditions).values) == 3
    for conditions in ({"path": "mlp"}, {"dtypes": ["bfloat16"]}):
        with pytest.raises(ValueError, match=r"residuals of jax.custom_vjp functions are float32"):
            coded(**conditions)


def test_residuals_wait_on_the_host():
    plan = jc.plan(jc.checkpoint(loss, of_residuals("offload")), WEIGHTS, X)
    assert [v.decision for v in plan.values if v.role == "residual"] == ["offload"] * 3


@pytest.mark.parametrize(
    ("action", "conditions", "message"),
    [
        ("recompute", {}, "action='recompute': expected 'keep', 'offload' or a codec"),
        ("open", {}, "action='open': expected op='checkpoint'"),
        (NEAREST, {"roles": ["operand"]}, "roles=.*: expected none with op='custom_vjp'"),
    ],
)
def test_rules_that_residuals_have_not(action, conditions, message):
    with pytest.raises(ValueError, match=message):
        Rule(action, op="custom_vjp", **conditions)
