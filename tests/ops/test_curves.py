import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp.codecs import _dithered
from jaxcomp.ops import _curves
from tests.helpers import kept


@pytest.mark.parametrize("curve", _curves.CURVES, ids=lambda c: c.function.__name__)
def test_functions_of_a_decoded_value_are_unbiased(curve):
    h = jnp.linspace(-3.5, 3.5, 64).reshape(1, 64, 1)
    gain, offset = jnp.full((1, 1, 1), 1.4), jnp.full((1, 1, 1), 0.2)
    z = gain * h + offset
    piece = jnp.zeros((), jnp.int32) if curve.piece is None else curve.piece(z)

    @jax.jit
    @jax.vmap
    def draw(seed):
        decoded, step = _dithered.decode(_dithered.encode(h, 4, seed), 4, h.shape)
        arguments = curve, decoded, step, gain, offset, piece
        return _curves.result(*arguments), *_curves.slopes(*arguments)

    found = draw(jnp.arange(20_000))
    slope = jax.jit(jax.vmap(jax.grad(curve.function)))(z.ravel()).reshape(z.shape)
    expected = curve.function(z), h, slope, slope * h
    for draws, exact in zip(found, expected, strict=True):
        error = np.asarray(draws.mean(0) - exact)
        deviation = np.asarray(draws.std(0)) / len(draws) ** 0.5
        assert np.all(np.abs(error) < 4.5 * deviation + 2e-3)
        assert np.sqrt(np.mean(error**2)) < 1.5 * np.sqrt(np.mean(deviation**2)) + 5e-4


@pytest.mark.parametrize(
    "curve", kept(_curves.CURVES, _curves.CURVES[::2]), ids=lambda c: c.function.__name__
)
def test_derivatives_are_those_of_jax(curve):
    with jax.enable_x64():  # a third derivative of `tanh` has large rounding errors
        z = jnp.linspace(-7.05, 7.05, 48)  # no kink is among them
        piece = jnp.zeros((), jnp.int32) if curve.piece is None else curve.piece(z)
        found, exact = curve.derivatives(z, piece), curve.function
        for order in range(4):
            is_approximate = order > 1 and curve.function is jax.nn.gelu
            atol = 7e-3 if is_approximate else 2e-6
            np.testing.assert_allclose(found[order], jax.vmap(exact)(z), rtol=1e-4, atol=atol)
            exact = jax.grad(exact)
