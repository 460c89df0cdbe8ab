import jax
import jax.numpy as jnp
import numpy as np

import jaxcomp as jc
from experiments.bench import limit
from jaxcomp.policies import Policy, Rule
from tests.helpers import normal


def test_distances_of_gaussian_values():
    """Dither has half the error of stochastic rounding; no unbiased code is below the limit."""
    x = normal((8, 256, 64))
    found = {name: limit.distance(x, code) for name, code in limit.coded(x, seed=1)}
    for bits in (2, 4):
        stochastic, dither = (
            found[str(jc.Quantize(bits, rounding=rounding))]
            for rounding in ("stochastic", "dither")
        )
        np.testing.assert_allclose(dither[1], stochastic[1] / 2, rtol=0.05)
    unbiased = [above for name, (_, _, above) in found.items() if name.startswith("Quantize")]
    assert min(unbiased) > 1


def test_a_subspace_is_unbiased():
    x = normal((512, 64)) @ normal((64, 64), seed=1)
    drawn = np.stack([limit._in_subspace(x, part=8, seed=seed)[0] for seed in range(400)])
    error, noise = drawn.mean(0) - x, drawn.std(0) / np.sqrt(len(drawn))
    assert np.abs(error / noise).mean() < 1.05 * np.sqrt(2 / np.pi)


def test_what_a_backward_pass_saves_is_recorded():
    def loss(x, w):
        return jnp.square(jax.nn.gelu(x @ w) @ w).mean()

    recorded = []
    rules = (Rule(limit.Recorded(role, recorded), roles=(role,)) for role in limit.KINDS)
    x, w = normal((64, 32)), normal((32, 32), seed=1)
    coded = jc.checkpoint(loss, Policy(tuple(rules)))
    assert jax.jit(jax.grad(coded, 1))(x, w).shape == w.shape
    roles = [role for role, _ in recorded]
    assert set(roles) == set(limit.KINDS)
    assert any(np.allclose(array, jax.nn.gelu(x @ w), atol=1e-6) for _, array in recorded)
