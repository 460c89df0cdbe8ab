"""A code that comes twice on a path: two codes, or a mean of independent noise between them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp as jc
from jaxcomp.transform._choice.paths import assign
from jaxcomp.transform._program.primitives import tangents_of
from jaxcomp.transform._program.program import Program
from tests.helpers import as_float, normal, slow

CODEC = jc.Quantize(bits=2)
X, W = normal((16, 32)), 0.3 * normal((32, 96), seed=1)
MAP = jnp.square(normal((16, 8, 8, 96), seed=2))


def sine(x, w):
    return jnp.sin(x @ w)


def weighted_mean(x, w):
    """Of 9,216 elements, of which all but 96 have weight 0."""
    h = sine(x, w)
    outer = h[:, :, None] * h[:, None, :]
    mean = jnp.mean(outer * (96 * jnp.eye(96)[None]), (1, 2))
    return jnp.sum(h * mean[:, None])


def gate(x, w):
    """Its code does not vary over the map whose mean is taken."""
    g = jax.nn.sigmoid(x @ w)[:, None, None]
    return jnp.sum(g * jnp.mean(g * g * MAP, (1, 2), keepdims=True))


def gated_norm(x, w):
    g = jax.nn.sigmoid(x @ w)[:, None, None]
    y = g * MAP
    return jnp.sum(y * jax.lax.rsqrt(jnp.mean(y * y, (1, 2), keepdims=True)) * MAP)


def masked_norm(x, w):
    """The norm of 4 of 96 features."""
    h, mask = sine(x, w), (jnp.arange(96)[None] < 4).astype(float)
    mean = jnp.mean((mask * h) ** 2, 1, keepdims=True)
    return jnp.sum(h * mask * jax.lax.rsqrt(mean * 24 + 0.1) * MAP[:, 0, 0])


def padded_mean(x, w):
    h = sine(x, w)
    mean = jnp.mean(jnp.concatenate([96 * h[:, :1] ** 2, jnp.zeros((16, 95))], 1), 1)
    return jnp.sum(h * mean[:, None])


def shifted_gate(x, w):
    """A gate's tangent meets one of the size of the map."""
    g = jax.nn.sigmoid(x @ w)[:, None, None]
    mean = jnp.mean(g * g + jnp.tanh(x @ w)[:, None, None] * MAP, (1, 2), keepdims=True)
    return jnp.sum(g * mean)


def layer_norm(x, w):
    return jnp.sum(jax.nn.standardize(sine(x, w)) ** 3)


UNEVEN = [weighted_mean, gate, gated_norm, masked_norm, padded_mean, shifted_gate]


@pytest.mark.parametrize("fn", UNEVEN)
def test_a_mean_without_independent_noise_does_not_count(fn):
    notes = [value.note for value in jc.checkpoint(fn, CODEC).plan(X, W).values]
    assert not any("across a mean" in note for note in notes)
    assert any("2 independent codes" in note for note in notes)


def test_two_codes_that_take_no_fewer_bytes_are_not_made():
    def fn(x, w):  # the codes of the sine take fewer bytes than the exact values of both
        return gate(x, w) + jnp.sum(sine(x, jnp.tile(w, (1, 4))))

    values = jc.checkpoint(fn, jc.Cast("bfloat16")).plan(X, W).values
    (twice,) = (value for value in values if "2 codes" in value.note)
    assert (twice.decision, twice.saved_bytes) == ("exact", 16 * 96 * 4)


def test_a_norms_mean_counts():
    notes = [value.note for value in jc.checkpoint(layer_norm, CODEC).plan(X, W).values]
    known = "used twice, across a mean of 96: bias of about its rounding variance / 96"
    assert any(note.startswith(known) for note in notes)


def test_every_second_use_across_a_mean_is_noted():
    """Of two codes before the mean, the second comes again where another path has only one."""

    def linear(t, code, weights):
        mean = ((t * code)[::-1] * code).sum() / 96
        return code * (mean + (t * code * weights).sum())

    program = Program.trace(linear, *jnp.ones((3, 96)))
    tangent, code, _ = program.arguments
    roots = {code: {code: frozenset()}}
    tangents = tangents_of(program.equations, [tangent])
    found = assign(program, tangents, lambda atom: roots.get(atom, {}))
    assert found.means == {code: 96}
    assert {number for uses in found.uses.values() for _, number in uses} == {0, 1}


@pytest.mark.parametrize("fn", [slow(gate), masked_norm])
def test_uneven_means_are_unbiased(fn):
    exact = np.ravel(jax.grad(fn, 1)(X, W))

    @jax.jit
    def gradient(seed):
        return jax.grad(jc.checkpoint(fn, CODEC, seed=seed), 1)(X, W)

    draws = np.stack([np.ravel(gradient(seed)) for seed in range(256)])
    along = (draws - exact) @ exact / (exact @ exact)
    assert abs(along.mean()) < 5 * along.std(ddof=1) / len(along) ** 0.5
    assert along.std() > 0


def test_a_relu_of_a_code_is_selected_by_its_mask():
    """Its operand follows from what the max pool keeps exactly, but is rebuilt from a code."""

    def loss(last, first, second, x, y):
        h = jax.lax.reduce_window(x @ first, -jnp.inf, jax.lax.max, (2, 1), (2, 1), "VALID")
        h = jax.nn.standardize(h @ second, axis=0)
        return jnp.sum(jax.nn.relu(h) @ last * y)

    def gradient(seed):
        run = jc.checkpoint(loss, CODEC, seed=seed)
        return jax.grad(lambda weights: run(*weights, *arrays))(weights)[0].ravel()

    weights = [0.2 * normal((32, 32), seed=i) for i in range(3)]
    arrays = normal((512, 32), seed=3), normal((256, 32), seed=4)
    draws = as_float(jax.jit(lambda seeds: jax.lax.map(gradient, seeds))(jnp.arange(400)))
    errors = draws - as_float(jax.grad(loss)(*weights, *arrays)).ravel()
    along = errors[200:] @ errors[:200].mean(0)  # where half of the draws say that a bias is
    assert abs(along.mean()) < 5 * along.std(ddof=1) / len(along) ** 0.5
    assert along.std() > 0
