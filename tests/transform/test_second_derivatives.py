"""Second derivatives, of functions in which nothing is coded and of losses with a gradient."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxcomp as jc
from tests.helpers import assert_close, assert_unbiased, normal, slow

POLICIES = (
    jc.Exact(),
    jax.checkpoint_policies.nothing_saveable,
    jax.checkpoint_policies.everything_saveable,
)
W = jnp.linspace(-1, 1, 9).reshape(3, 3)


@jax.custom_jvp
def rounded(x):
    return jnp.round(4 * x) / 4


@rounded.defjvp
def _straight_through(primals, tangents):
    return rounded(*primals), tangents[0] * (1 + primals[0])


@jax.custom_jvp
def mixed(x):
    return jnp.sin(x @ W)


@mixed.defjvp
def _other_derivative(primals, tangents):
    return mixed(*primals), 2 * jnp.cos(primals[0] @ W) * (tangents[0] @ W)


def _sine(optimize_remat):
    """A `jax.custom_vjp` function whose derivative is a triple one."""
    sine = jax.custom_vjp(jnp.sin)
    backward = lambda x, g: (3 * jnp.cos(x) * g,)  # noqa: E731
    sine.defvjp(lambda x: (jnp.sin(x), x), backward, optimize_remat=optimize_remat)
    return sine


FUNCTIONS = {
    "a rule of cheap steps": lambda x: x * rounded(x) ** 2,
    "a rule with a product": lambda x: x * mixed(x),
    "rules of JAX": lambda x: jnp.sin(x) * jnp.sinc(x) * jax.nn.softplus(x) * jax.nn.relu(x),
    "ties": lambda x: x * jnp.maximum(x, 0.0) * jnp.clip(x, -0.5, 0.5),
}


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        *((POLICIES[0], name) for name in FUNCTIONS),
        *((policy, "a rule with a product") for policy in POLICIES[1:]),
    ],
)
def test_second_derivatives_are_the_functions_own(name, policy):
    x = jnp.array([[-1.0, -0.5, 0.0], [0.1, 0.5, 2.0]])

    def second(fn):
        slope = jax.grad(lambda x: jnp.sum(fn(x)))
        return jax.jit(jax.grad(lambda x: jnp.sum(slope(x) ** 2)))(x)

    fn = FUNCTIONS[name]
    assert_close(second(jc.checkpoint(fn, policy)), second(fn))


AROUND = {
    "alone": lambda f: lambda x: x * f(2 * x),
    "jit": lambda f: lambda x: x * jax.jit(f)(2 * x),
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(2 * c), None), x, None, length=2)[0],
    "cond": lambda f: lambda x: lax.cond(x.sum() > 0, f, jnp.cos, x),
}


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        *((POLICIES[1], name) for name in ("scan", "cond")),
        (POLICIES[0], "scan"),
        *(slow(POLICIES[1], name) for name in ("alone", "jit")),
        slow(POLICIES[2], "scan"),
    ],
)
def test_second_derivatives_of_a_custom_vjp_with_optimize_remat(name, policy):
    """JAX itself has none under `jax.checkpoint`: those without the option are expected."""
    x, around = jnp.linspace(0.1, 1, 5), AROUND[name]

    def second(fn):
        slope = jax.grad(lambda x: jnp.sum(fn(x)))
        return jax.jit(jax.grad(lambda x: jnp.sum(slope(x) ** 2)))(x)

    ours = second(jc.checkpoint(around(_sine(True)), policy))
    assert_close(ours, second(around(_sine(False))))


def _mlp(weights, x):
    return jax.nn.silu(jax.nn.silu(x @ weights[0]) @ weights[1]) @ weights[2]


def _forces(weights, x):
    """The loss of an interatomic potential."""

    def energy(positions):
        distances = jnp.sqrt(jnp.square(positions[:, None] - positions[None]).sum(-1) + 0.01)
        centres = jnp.arange(8.0).reshape(1, 1, 8)
        features = jnp.exp(-jnp.square(distances[..., None] - centres))
        return _mlp(weights, features).sum()

    return jnp.square(jax.vmap(jax.grad(energy))(x.reshape(4, -1, 3)) - 1).mean()


def _penalty(weights, x):
    """The loss of a WGAN's critic, with the penalty of its gradient."""

    def score(x):
        return _mlp(weights, x)[..., 0]

    norms = jnp.linalg.norm(jax.vmap(jax.grad(score))(x.reshape(-1, 8)), axis=-1)
    return score(x.reshape(-1, 8)).mean() + 10 * jnp.square(norms - 1).mean()


@pytest.mark.parametrize("loss", [_forces, slow(_penalty)])
def test_a_loss_that_contains_a_gradient_is_coded_as_a_whole(loss):
    weights = [0.3 * normal(shape, seed=i) for i, shape in enumerate([(8, 32), (32, 32), (32, 1)])]
    x = normal((96,), seed=3)
    exact = jax.jit(jax.grad(loss))(weights, x)
    plan = jc.plan(jc.checkpoint(loss, jc.Quantize(bits=4)), weights, x)
    assert plan.saved_bytes < 0.4 * plan.exact_bytes

    def draw(seed):
        return jax.grad(jc.checkpoint(loss, jc.Quantize(bits=4), seed=seed))(weights, x)

    draws = jax.jit(lambda seeds: lax.map(draw, seeds))(jnp.arange(128, dtype=jnp.uint32))
    for i, of_leaf in enumerate(exact):
        assert_unbiased(draws[i], of_leaf)


def test_an_inner_gradient_of_codes_says_what_to_do():
    inner = jc.checkpoint(lambda x: jnp.sin(x @ x).sum(), jc.Quantize(bits=4))

    with pytest.raises(NotImplementedError, match=r"jaxcomp\.checkpoint around the whole loss"):
        jax.grad(lambda x: jnp.square(jax.grad(inner)(x)).sum())(normal((64, 64)))
