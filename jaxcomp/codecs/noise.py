"""Stateless rounding noise: an integer hash of a value's own bits, its index and a seed."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt32

from jaxcomp.codecs._codec import Seed

GOLDEN = 0x9E3779B9  # 2^32 over the golden ratio: its multiples, such as seeds, lie far apart


def _mix(h: Array) -> Array:
    """Avalanches 32-bit words ("lowbias32" of C. Wellons' hash prospector)."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x7FEB352D)
    h = (h ^ (h >> 15)) * jnp.uint32(0x846CA68B)
    return h ^ (h >> 16)


def _index(shape: tuple[int, ...]) -> Array:
    """Row-major index of every element, modulo 2^32."""
    index = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape))):
        step = jnp.uint32(stride % 2**32)
        index += lax.broadcasted_iota(jnp.uint32, shape, axis) * step
        stride *= shape[axis]
    return index


@jax.jit
def _hash(x: Array, salt: Array) -> Array:
    """A 32-bit word for each element, of its own bits, its index and a salt."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return _mix(bits ^ (_index(x.shape) * jnp.uint32(GOLDEN) + salt))


def uniform(x: Float[Array, "*shape"], seed: Seed = None) -> Float[Array, "*shape"]:
    """Draws one number in (0, 1) for each element of an array, without a key or a state.

    The number is a hash of the element's own bits, its index in the (global) array and `seed`, so
    it differs between steps, layers, shards, `vmap` lanes and `scan` iterations where values do,
    and is the same on any number of devices. A value that comes back at the same index with the
    same seed is rounded the same way: the layers of `jaxcomp.nn` take the `fingerprint` of their
    parameters for a seed. The number lies on a grid of 2^-16, offset by half a step.

    Args:
        x: The values that will be rounded.
        seed: Integer scalar that redraws all numbers; None is 0.

    Returns:
        float32 array of the shape of `x`.

    Raises:
        TypeError: If `seed` is not an integer scalar.

    Example:
        >>> bool(jnp.all(uniform(jnp.ones(4)) == uniform(jnp.ones(4))))
        True
    """
    return fraction(words(x, seed))


def fraction(words: UInt32[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The numbers in (0, 1) that `uniform` makes of random words: their upper 16 bits."""
    return (words >> 16).astype(jnp.int32).astype(jnp.float32) * 2.0**-16 + 2.0**-17


def words(x: Float[Array, "*shape"], seed: Seed = None) -> UInt32[Array, "*shape"]:
    """Draws 32 random bits for each element of an array: what `uniform` makes its numbers of.

    Raises:
        TypeError: If `seed` is not an integer scalar.
    """
    seed = jnp.asarray(0 if seed is None else seed)
    if seed.shape or not jnp.issubdtype(seed.dtype, jnp.integer):
        raise TypeError(
            f"seed of shape {seed.shape} and dtype {seed.dtype}: expected an integer scalar"
        )
    return _hash(x, _mix(seed.astype(jnp.uint32) + jnp.uint32(1)))


def folded(seed: Seed, number: int | Array) -> UInt32[Array, ""]:
    """Another seed for each number, such as that of an iteration.

    Example:
        >>> bool(folded(0, 1) == folded(1, 0))
        False
    """
    base = jnp.asarray(0 if seed is None else seed).astype(jnp.uint32)
    return _mix(_mix(base + jnp.uint32(1)) + jnp.asarray(number).astype(jnp.uint32))


def fingerprint(*arrays: Float[Array, "..."]) -> UInt32[Array, ""]:
    """A seed for `uniform` that is another whenever a value of the arrays is.

    Example:
        >>> bool(fingerprint(jnp.zeros(2)) == fingerprint(jnp.array([0.0, 1e-7])))
        False
    """
    seed = jnp.uint32(0)
    for x in arrays:
        words = _hash(lax.stop_gradient(x), jnp.uint32(0))
        seed = _mix(seed ^ lax.reduce(words, jnp.uint32(0), lax.bitwise_xor, range(x.ndim)))
    return seed
