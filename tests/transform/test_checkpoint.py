"""Every function of the library, through `checkpoint`: exact with `Exact`, unbiased with codes."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp as jc
from jaxcomp.codecs import noise
from tests.helpers import as_float, assert_close, kept, normal, z_limit
from tests.transform.library import LIBRARY

DRAWS = 256
STEP = 0.25


@dataclasses.dataclass(frozen=True)
class Coarse(jc.Codec):
    """Bytes in steps of a quarter, rounded at random: unbiased in [-32, 31.75], and quick."""

    name: typing.ClassVar[str] = "coarse"
    unbiased = True

    def _encode(self, x, seed):
        return (jnp.floor(x / STEP + noise.uniform(x, seed)).astype(jnp.int8),)

    def _decode(self, arrays, shape, dtype):
        return (arrays[0] * STEP).astype(dtype)


CODEC = Coarse()


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


# As others: of the same kind of primitive, or combinations that other files have.
SELDOM = (
    "sub mul min rem cube reshape rev squeeze slice pad dynamic_update scatter_mul cumprod "
    "cummax reduce_prod log_softmax leaky_relu_alone leaky_relu exact_gelu softplus swiglu "
    "conv_net max_pool attention linear_attention triangular_solve eigh svd slogdet "
    "complex_fft rfft fori_loop map vmap switch jit barrier flags unused identity scalar "
    "closure "
)
assert LIBRARY.keys() >= {*SELDOM.split()}


@pytest.mark.parametrize("name", kept(LIBRARY, LIBRARY.keys() - {*SELDOM.split()}))
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
    for i, (drawn, exact) in enumerate(zip(draws, expected, strict=True)):
        # Sums of many elements, since one alone is rarely rounded if it is near to a level.
        sums = np.random.default_rng(i).normal(size=(exact.size, 8))
        drawn = as_float(jnp.real(drawn)).reshape(DRAWS, -1) @ sums
        exact = as_float(jnp.real(exact)).reshape(-1) @ sums
        std = drawn.std(0, ddof=1) / DRAWS**0.5
        allowed = z_limit(8 * len(LIBRARY)) * std + 1e-4 * np.abs(exact).max(initial=0)
        assert np.all(np.abs(drawn.mean(0) - exact) <= allowed)


def test_a_key_redraws_the_noise():
    x, w = normal((16, 64)), normal((64, 32), seed=1)

    def gradient(seed):
        return jax.grad(jc.checkpoint(lambda w: jnp.sin(jnp.tanh(x @ w)).sum(), CODEC, seed=seed))(
            w
        )

    one, other = jax.random.split(jax.random.key(0))
    np.testing.assert_array_equal(gradient(one), gradient(one))
    np.testing.assert_array_equal(gradient(one), gradient(jax.random.bits(one)))
    assert (gradient(one) != gradient(other)).any()
    with pytest.raises(TypeError, match="expected an integer scalar or a key"):
        gradient(jax.random.split(one))
