import typing

import jax
import numpy as np
import pytest
from flax import nnx


def _assert_same(got: typing.Any, expected: typing.Any) -> None:
    """Trees of equal structure whose arrays have equal dtype, shape and bits."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes(), np.abs(a.astype(np.float64) - b).max()


@pytest.fixture
def assert_same() -> typing.Callable[[typing.Any, typing.Any], None]:
    return _assert_same


@pytest.fixture
def apply() -> typing.Callable[..., typing.Any]:
    """Calls a copy of a module under jit; returns its output and its state afterwards."""

    def call(module: nnx.Module, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        graphdef, state = nnx.split(module)

        @jax.jit
        def pure(state: nnx.State, *args: typing.Any) -> typing.Any:
            merged = nnx.merge(graphdef, state)
            return merged(*args, **kwargs), nnx.state(merged)

        return pure(state, *args)

    return call
