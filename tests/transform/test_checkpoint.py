import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp as jc
from tests.helpers import as_float, assert_close, normal, z_limit
from tests.transform.library import LIBRARY

DRAWS = 192
CODEC = jc.Quantize(bits=2, group="row")


def _is_active(leaf):
    return jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.inexact)


def _gradient(fn, args):
    """Of a weighted sum of the function's results, as a function of the floating arguments."""
    leaves, tree = jax.tree.flatten(args)
    active = [i for i, leaf in enumerate(leaves) if _is_active(leaf)]

    def loss(chosen):
        full = dict(enumerate(leaves)) | dict(zip(active, chosen, strict=True))
        made = fn(*jax.tree.unflatten(tree, list(full.values())))
        smooth = [leaf for leaf in jax.tree.leaves(made) if _is_active(leaf)]
        return sum(jnp.sum(jnp.real(y) * normal(y.shape, seed=9 + i)) for i, y in enumerate(smooth))

    return jax.grad(loss)([jnp.asarray(leaves[i]) for i in active])


@pytest.mark.parametrize("name", LIBRARY)
def test_gradient_is_exact_with_exact_and_unbiased_with_codes(name):
    fn, args = LIBRARY[name]

    def all_ways():
        exact = _gradient(fn, args)
        same = _gradient(jc.checkpoint(fn, jc.Exact()), args)

        def draw(seed):
            return _gradient(jc.checkpoint(fn, CODEC, seed=seed), args)

        return exact, same, jax.vmap(draw)(jnp.arange(DRAWS))

    expected, same, draws = jax.jit(all_ways)()
    assert_close(jax.tree.map(jnp.real, same), jax.tree.map(jnp.real, expected), 2e-5)
    for drawn, exact in zip(draws, expected, strict=True):
        drawn, exact = as_float(jnp.real(drawn)), as_float(jnp.real(exact))
        error = np.abs(drawn.mean(0) - exact)
        std = drawn.std(0, ddof=1) / DRAWS**0.5
        scale = np.max(np.abs(exact), initial=0)
        assert np.all(error <= z_limit(exact.size) * std + 1e-4 * scale)
