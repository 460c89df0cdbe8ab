import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp as jc
from tests.helpers import without_remat3

CONTRACT = (((1,), (0,)), ((), ()))
X = jnp.asarray(np.random.default_rng(0).normal(size=(16, 32)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).normal(size=(32, 32)), jnp.float32)


def _network(codec: jc.Codec) -> typing.Callable[..., jax.Array]:
    def network(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(3):
            x = jc.ops.relu(jc.ops.dot_general(jnp.sin(x), w, CONTRACT, codec=codec))
        return x.sum()

    return network


def _stored(f: typing.Callable[..., jax.Array], policy: typing.Any) -> list[typing.Any]:
    """Shapes and dtypes of what waits for the backward pass besides the arguments."""
    leaves = jax.tree.leaves(jax.vjp(jax.checkpoint(f, policy=policy), X, W)[1])
    return sorted((a.dtype.name, a.shape) for a in leaves if a is not X and a is not W)


@without_remat3
def test_codes_masks_and_ranges_are_saved_and_nothing_else() -> None:
    codec = jc.Quantize(bits=2)
    layer = [*codec.encode(X).arrays, *jc.Packed(bits=1).encode(X > 0).arrays]
    expected = sorted([(a.dtype.name, a.shape) for a in layer] * 3)
    assert _stored(_network(codec), jc.policies.save_compressed()) == expected
    assert _stored(_network(codec), None) == []


@without_remat3
def test_a_codec_of_ones_own_is_saved() -> None:
    @dataclasses.dataclass(frozen=True)
    class Half(jc.Codec):
        name: typing.ClassVar[str] = "half"
        unbiased = False

        def _encode(self, x: jax.Array, seed: typing.Any) -> tuple[jax.Array, ...]:
            return (x.astype(jnp.float16),)

        def _decode(self, arrays: typing.Any, shape: typing.Any, dtype: typing.Any) -> jax.Array:
            return arrays[0].astype(dtype)

    stored = _stored(_network(Half()), jc.policies.save_compressed())
    assert stored.count(("float16", (16, 32))) == 3


@without_remat3
def test_gradient_is_that_without_checkpoint() -> None:
    f = _network(jc.Quantize(bits=2))
    again = jax.checkpoint(f, policy=jc.policies.save_compressed())
    got, expected = (jax.jit(jax.grad(g, (0, 1)))(X, W) for g in (again, f))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, expected)


def test_an_option_of_jax_that_ignores_names_is_told() -> None:
    if "jax_remat3" not in jax.config.values:
        pytest.skip("JAX before 0.10.2 has no such option")
    before = jax.config.values["jax_remat3"]
    jax.config.update("jax_remat3", True)
    try:
        with pytest.raises(NotImplementedError, match="with the option jax_remat3"):
            jc.policies.save_compressed()
    finally:
        jax.config.update("jax_remat3", before)
