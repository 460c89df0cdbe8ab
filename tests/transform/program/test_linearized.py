"""Tests of derivatives that are put together of those of equations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp.memory._origin import scopes_of
from jaxcomp.transform._program.builder import flat
from jaxcomp.transform._program.linearized import linearize, transpose
from jaxcomp.transform._program.program import Program
from tests.helpers import slow


@pytest.fixture
def calls(monkeypatch):
    """The names of the functions of JAX that take derivatives, once for each call."""
    names = []

    def count(name):
        function = getattr(jax, name)

        def counted(*args, **kwargs):
            names.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(jax, name, counted)

    count("linearize")
    count("linear_transpose")
    return names


def _layers(x):
    for number in range(5):
        with jax.named_scope(f"layer{number}"):
            x = jnp.sin(x)
    return x


def test_equal_equations_are_derived_once_and_keep_their_scopes(calls):
    linearized = linearize(flat(Program.trace(_layers, jnp.ones(3))), (0,))
    transpose(linearized.linear, 1)
    assert calls == ["linearize", "linear_transpose"]
    for program in (linearized.forward, linearized.linear, transpose(linearized.linear, 1)):
        scopes = {scopes_of(e.source_info.name_stack) for e in program.equations}
        assert scopes == {(f"layer{number}",) for number in range(5)}


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: (x[:, 2] + x[:, :1].sum(1), y[:3, 1] * y[1:, 2]),
        slow(lambda x, y: (jnp.floor(x) * x, jnp.ones(2))),
        lambda x, y: (x, x + x, jnp.sort(y, 0) ** 2 @ y.T, jnp.arange(3)),
        slow(lambda x, y: jnp.split(x * y[:3], 2, 1)[1:]),
        lambda x, y: jnp.broadcast_to(x[:, :1], (3, 4)) + jnp.broadcast_to(x[:1], (3, 4)),
    ],
    ids=["slices", "zeros", "sums", "parts", "equal_types_of_results"],
)
def test_against_jax(function):
    x, y = (jnp.array(np.random.default_rng(0).normal(size=s), "float32") for s in ((3, 4), (4, 4)))
    linearized = linearize(flat(Program.trace(function, x, y)), (0, 1))
    made = linearized.forward(x, y)
    smooth = [made[i] for i in linearized.smooth]
    coefficients = made[linearized.results :]

    def real(*arguments):
        return [jax.tree.leaves(function(*arguments))[i] for i in linearized.smooth]

    results, tangents = jax.jvp(real, (x, y), (y[:3], y))
    assert jax.tree.all(jax.tree.map(np.array_equal, results, smooth))
    moved = linearized.linear(*coefficients, y[:3], y)
    np.testing.assert_allclose(
        np.concatenate([*map(np.ravel, moved)]),
        np.concatenate([*map(np.ravel, tangents)]),
        rtol=1e-6,
    )
    backward = transpose(linearized.linear, 2)(*coefficients, *smooth)
    for cotangent, expected in zip(backward, jax.vjp(real, x, y)[1](results), strict=True):
        np.testing.assert_allclose(cotangent, expected, rtol=1e-6)
