import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp import Packed
from jaxcomp.codecs._codec import array_nbytes
from jaxcomp.codecs.packing import WIDTHS


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8, jnp.int8])
def test_integers_are_exact(bits, dtype):
    codec = Packed(bits)
    top = min(2**bits, 128)  # what int8 holds
    x = jnp.asarray(np.random.default_rng(0).integers(0, top, (3, 5, 7)), dtype)
    decoded = codec.decode(codec.encode(x))
    assert decoded.dtype == dtype
    np.testing.assert_array_equal(decoded, x)


@pytest.mark.parametrize("bits", WIDTHS)
def test_booleans_are_exact(bits):
    x = jnp.asarray(np.random.default_rng(0).random((3, 5, 7)) < 0.5)
    decoded = Packed(bits).decode(Packed(bits).encode(x))
    assert decoded.dtype == jnp.bool
    np.testing.assert_array_equal(decoded, x)


@pytest.mark.parametrize(
    ("bits", "shape", "nbytes"),
    [
        (1, (4, 64), 4 * 8),
        (1, (4, 5, 7), 4 * 5 * 1),
        (2, (3, 5), 5),  # 9 pairs in 4 bits
        (3, (3, 5), 5 + 3),  # 2 bits each, and a byte a sample
        (4, (3, 5), 8),
        (8, (3, 5), 15),
        (1, (0, 5), 0),
        (1, (), 1),
    ],
)
def test_bytes(bits, shape, nbytes):
    assert Packed(bits).nbytes(shape, jnp.bool) == nbytes
    leaves = jax.tree.leaves(Packed(bits).encode(jnp.zeros(shape, jnp.bool)))
    assert sum(array_nbytes(leaf.shape, leaf.dtype) for leaf in leaves) == nbytes


def test_other_bits_are_an_error():
    with pytest.raises(ValueError, match=r"bits=7: expected one of"):
        Packed(7)


def test_floating_point_is_an_error():
    with pytest.raises(TypeError, match="booleans and integers; got x of dtype float32"):
        Packed(1).nbytes((3,), jnp.float32)
