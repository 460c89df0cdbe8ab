"""Large constants beside other numbers: they are found, and gradients behind them are right."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxcomp as jc
from jaxcomp.transform._choice.outliers import outliers
from jaxcomp.transform._program.builder import flat
from jaxcomp.transform._program.program import Program
from tests.helpers import normal

KEPT = 100
SHAPE = (256, 128)
LEGAL = jnp.arange(SHAPE[1]) < KEPT


def where(scores):
    return jnp.where(LEGAL[None], scores, -1e9)


def with_bias(scores):
    return scores + (1.0 - LEGAL.astype(scores.dtype))[None] * -1e9


def padded(scores):
    return jnp.pad(scores[:, :KEPT], [(0, 0), (0, 28)], constant_values=-1e9)


def scattered(scores):
    return jnp.full(SHAPE, -1e9).at[:, jnp.arange(KEPT)].set(scores[:, :KEPT])


FORMS = {
    "where": where,
    "bias": with_bias,
    "selected bias": lambda x: x + jnp.where(LEGAL, 0.0, jnp.finfo(x.dtype).min)[None],
    "quotient": lambda x: x + (LEGAL[None] - 1) / 1e-9,
    "blend": lambda x: x * LEGAL[None] + (1 - LEGAL[None]) * -1e4,
    "pad": padded,
    "parts": lambda x: jnp.concatenate([x[:, :KEPT], jnp.full((256, 28), 1e4)], axis=1),
    "set": lambda x: x.at[:, KEPT:].set(-1e9),
    "scatter": scattered,
    "scaled": lambda x: -2.0 * where(x) + 1.0,
    "square": lambda x: where(x) ** 2,
    "maximum": lambda x: jnp.maximum(where(x), -where(x)),
}
NONE = {
    "zeros": lambda x: jnp.where(LEGAL[None], x, 0.0),
    "shift": lambda x: x + 1e4,
    "scale": lambda x: 1e4 * x,
    "one number": lambda x: jnp.where(LEGAL[None], jnp.float32(1e4), 1e4) + x,
    "exp": lambda x: jnp.exp(where(x)),
    "relu": lambda x: jax.nn.relu(where(x)),
    "product with what is 0 there": lambda x: where(x) * jnp.exp(where(x)),
    "clipped": lambda x: jnp.clip(x, -1e9, 1e9),
    "a mean": lambda x: x - where(x).mean(),
}


def held(function):
    program = flat(Program.trace(function, jax.ShapeDtypeStruct(SHAPE, jnp.float32)))
    (result,) = program.results
    return outliers(program, {}).held.get(result)


@pytest.mark.parametrize("form", FORMS)
def test_a_large_constant_is_found(form):
    assert abs(held(FORMS[form]).constant) >= 1e4


@pytest.mark.parametrize("form", NONE)
def test_what_holds_none(form):
    assert held(NONE[form]) is None


def scaled(masked, params, x):
    return jax.nn.log_softmax(masked(x @ params["w"]) * params["scale"], -1)


def likelihood(masked, params, x):
    return -scaled(masked, params, x)[:, :KEPT].mean()


def entropy(masked, params, x):
    logs = scaled(masked, params, x)
    return -(jnp.exp(logs) * logs).sum(-1).mean()


def gated(masked, params, x):
    return (jax.nn.gelu(masked(x @ params["w"]) * params["scale"]) ** 2).mean()


def between_products(masked, params, x):
    hidden = jax.nn.silu(masked(x @ params["w"]) * params["scale"])
    return ((hidden @ params["w"].T) ** 2).mean()


def repeated(loss, params, x):
    """With the mask's numbers outside of the loop."""
    bias = jnp.where(LEGAL, 0.0, -1e9)[None]

    def step(total, scale):
        one = params | {"scale": scale}
        return total + loss(lambda scores: scores + bias, one, x), None

    return lax.scan(step, 0.0, jnp.stack([params["scale"], 1.1 * params["scale"]]))[0]


@pytest.mark.parametrize(
    "loss",
    [
        functools.partial(likelihood, where),
        functools.partial(entropy, with_bias),
        functools.partial(gated, padded),
        functools.partial(between_products, where),
        functools.partial(repeated, likelihood),
        functools.partial(repeated, entropy),
    ],
)
def test_the_gradient_of_a_factor_of_masked_scores(loss):
    """A code of the scores has no levels for numbers beside -1e9: this gradient was near zero."""
    params = {"w": normal((64, SHAPE[1])) / 8, "scale": jnp.float32(1.3)}
    x = normal((SHAPE[0], 64), seed=1)
    coded = jc.checkpoint(loss, "automatic")
    found, exact = (jax.jit(jax.grad(f))(params, x) for f in (coded, loss))
    for name in params:
        error = np.linalg.norm(found[name] - exact[name])
        assert error < 0.15 * np.linalg.norm(exact[name])


def test_a_code_of_the_scores_in_front_of_the_mask_serves():
    params = {"w": normal((64, SHAPE[1])), "scale": jnp.float32(1.0)}
    plan = jc.plan(
        jc.checkpoint(functools.partial(likelihood, where), "automatic"), params, normal((256, 64))
    )
    assert plan.saved_bytes < 0.3 * np.prod(SHAPE) * 4


def test_the_plan_says_why_a_value_has_no_code():
    params = {"w": normal((64, SHAPE[1])), "scale": jnp.float32(1.0)}
    plan = jc.plan(
        jc.checkpoint(functools.partial(gated, where), "automatic"), params, normal((256, 64))
    )
    assert any("-1e+09" in value.note for value in plan.values)
