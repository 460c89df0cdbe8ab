"""Stateless rounding noise: an integer hash of a seed, an index and, mostly, a value's bits."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Inexact, Int32, UInt32

from jaxcomp._core import platforms
from jaxcomp._core.explicit import over_automatic_axes
from jaxcomp.codecs._codec import Seed

GOLDEN = 0x9E3779B9  # 2^32 over the golden ratio; its multiples lie far apart
HALF = np.uint32(1 << 31)  # the word with which `rounded` rounds to the nearest level
PLACES = 1024  # elements of an array that `spot_check` reads
_FEW_PLACES = 256  # elements of an array that `salt` reads: its kernel is compiled for each shape


# Such a function is traced once for each type. Outside of one, each operator is a call to trace.
_inlined = functools.partial(jax.jit, inline=True)


@_inlined
def _mix_upper(h: Array) -> Array:
    """Mixes 32-bit words; the upper 16 bits of the result are those of `_mix`."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x7FEB352D)
    return (h ^ (h >> 15)) * jnp.uint32(0x846CA68B)


@_inlined
def _mix(h: Array) -> Array:
    """Mixes 32-bit words: "lowbias32" of C. Wellons' hash prospector."""
    h = _mix_upper(h)
    return h ^ (h >> 16)


def _salted_index(shape: tuple[int, ...], factor: int, salt: Array) -> Array:
    """Returns the row-major index of every element times a factor, plus a salt, modulo 2^32.

    The indices along each axis are made from the salt: JAX moves an array that depends on nothing
    out of a `jax.lax.scan`, where it would be kept as a whole.
    """
    index = lax.broadcast(salt, shape)
    stride = factor
    for axis in reversed(range(len(shape))):
        along = lax.iota(jnp.uint32, shape[axis]) * jnp.uint32(stride % 2**32) + (salt & 0)
        index += lax.broadcast_in_dim(along, shape, (axis,))
        stride *= shape[axis]
    return index


def _index(shape: tuple[int, ...], salt: Array) -> Array:
    """Returns the row-major index of every element, modulo 2^32.

    On a GPU a count takes fewer instructions than sums of tables, and no kernels that make tables.
    """

    def by_axes(salt: Array) -> Array:
        return _salted_index(shape, 1, salt & 0)

    def by_count(salt: Array) -> Array:
        return (lax.iota(jnp.uint32, math.prod(shape)) + (salt & 0)).reshape(shape)

    return platforms.index_by_axes_on_tpu(salt, by_axes, by_count)


def _salted(x: Array, salt: Array) -> Array:
    """Returns a word of each element's bits, its index and a salt, to be mixed."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return bits ^ _salted_index(x.shape, GOLDEN, salt)


@jax.jit
def _hash(x: Array, salt: Array) -> Array:
    """Returns a 32-bit hash of each element's bits, its index and a salt."""
    return _mix(_salted(x, salt))


@jax.jit
def _upper_hash(x: Array, salt: Array) -> Array:
    """Returns words whose upper 16 bits are those of `_hash`."""
    return _mix_upper(_salted(x, salt))


def uniform(x: Float[Array, "*shape"], seed: Seed = None) -> Float[Array, "*shape"]:
    """Draws one number in (0, 1) for each element of an array, without a key or state.

    The number is a hash of the element's bits, its index in the (global) array and `seed`. It
    differs between steps, layers, shards, `vmap` lanes and `scan` iterations wherever values
    differ. It does not depend on the number of devices. The same value at the same index with the
    same seed always gets the same number, so the layers of `jaxcomp.nn` use the `fingerprint` of
    their parameters as the seed. Numbers lie on a grid of 2^-16, offset by half a step.

    Args:
        x: float32, bfloat16 or float16 array; the values to round.
        seed: Integer scalar that selects the numbers; None is 0.

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
    """Converts random words to numbers in (0, 1), from their upper 16 bits.

    Args:
        words: 32 random bits for each element, from `words`.

    Returns:
        float32 array; what `uniform` returns.
    """
    return from_one(words) - (1 - 2.0**-17)


def from_one(words: UInt32[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Converts random words to numbers in [1, 2), which are `fraction` plus 1 - 2^-17.

    Args:
        words: 32 random bits for each element, from `words`.
    """
    # The bits of such a float. GPUs convert an integer more slowly.
    bits = words >> 9 & jnp.uint32(0x7FFF80) | jnp.uint32(0x3F800000)
    return lax.bitcast_convert_type(bits, jnp.float32)


def rounded(
    level: Float[Array, "*shape"], words: UInt32[Array, "*#shape"], bits: int
) -> Int32[Array, "*shape"]:
    """Rounds levels down or up at random, so that the mean is the level.

    A level is rounded to a multiple of 2^-16, or of 2^-15 with 8 bits. The upper bits of its word
    are added, and the integer part is taken, all by integers. On a GPU that takes fewer
    instructions than a conversion. TPUs convert, except with 8 bits: a step with 2-bit codes then
    needs 6% less memory, and 4% more cycles.

    Args:
        level: float32 levels in [0, 2^bits - 1].
        words: 32 random bits for each element, from `words`, of which the upper 16 are used.
        bits: Bits of the result, up to 8.

    Returns:
        int32 integers in [0, 2^bits); undefined integers where the level is NaN.

    Example:
        >>> words = jnp.array([2**30, 2**31, 2**32 - 1], jnp.uint32)
        >>> rounded(jnp.array([1.7, 1.7, 3.0]), words, bits=2).tolist()
        [1, 2, 3]
    """
    by_bits = functools.partial(_by_bits, bits)
    if bits == 8:  # the sum of a level and a fraction would lose bits
        return by_bits(level, words)
    return platforms.convert_to_round_on_tpu((level, words), _by_conversion, by_bits)


def _by_conversion(level: Array, words: Array) -> Array:
    return jnp.floor(level + fraction(words)).astype(jnp.int32)


def _by_bits(bits: int, level: Array, words: Array) -> Array:
    whole = max(bits, 7)  # bits before the point
    point = 23 - whole
    fixed = lax.bitcast_convert_type(level + 2.0**whole, jnp.int32)
    added = lax.bitcast_convert_type(words >> (32 - point), jnp.int32)
    return (fixed + added) >> point & (2**bits - 1)


def words(x: Float[Array, "*shape"], seed: Seed = None) -> UInt32[Array, "*shape"]:
    """Draws random bits for each element of an array, as `uniform` does before `fraction`.

    Args:
        x: float32, bfloat16 or float16 array; the values to round.
        seed: Integer scalar that selects the bits; None is 0.

    Returns:
        uint32 array of the shape of `x`, whose upper 16 bits are random.

    Raises:
        TypeError: If `seed` is not an integer scalar.
    """
    seed = jnp.asarray(0 if seed is None else seed)
    if seed.shape or not jnp.issubdtype(seed.dtype, jnp.integer):
        raise TypeError(
            f"seed of shape {seed.shape} and dtype {seed.dtype}: expected an integer scalar"
        )
    return _upper_hash(x, _mix(seed.astype(jnp.uint32) + jnp.uint32(1)))


def salt(
    seed: Seed, x: Inexact[Array, "..."], *parameters: Float[Array, "..."]
) -> UInt32[Array, ""]:
    """Mixes up to 256 elements of each of some arrays into a seed.

    Their places are chosen as by `spot_check`. The seed is behind a barrier, or XLA computes it
    again in each kernel that reads it.

    Args:
        seed: Integer scalar; None is 0.
        x: Floating-point array.
        *parameters: The parameters of the layer.

    Returns:
        A seed for `indexed_words`, or for codes of what follows from `x`. It differs between
        batches, lanes of `jax.vmap` and devices of `jax.shard_map`, if 4% of the elements of an
        array do.

    Example:
        >>> bool(salt(0, jnp.zeros((9, 9))) == salt(0, jnp.full((9, 9), 1e-7)))
        False
    """

    def digest(*arrays: Array) -> Array:
        """Mixes the elements at each place, and sums, in a single small kernel."""
        vectors = [_sampled(array, _FEW_PLACES) for array in arrays]
        count = max(vector.size for vector in vectors)
        h = _word(seed)
        for vector in vectors:
            bits = lax.bitcast_convert_type(vector, jnp.uint32)
            h = (h ^ jnp.pad(bits, (0, count - vector.size))) * jnp.uint32(0x846CA68B)
            h ^= h >> 23
        weight = lax.iota(jnp.uint32, count) * jnp.uint32(GOLDEN)
        return (h * (weight ^ (weight >> 15) | 1)).sum(dtype=jnp.uint32)

    made = over_automatic_axes(digest, (x, *parameters), like=jnp.zeros(()))
    return lax.optimization_barrier(made)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def indexed_words(shape: tuple[int, ...], salt: UInt32[Array, ""]) -> UInt32[Array, "*shape"]:
    """Draws random bits for each index of an array, for noise that decoding needs again.

    Unlike those of `words` they do not depend on the values, so `salt` has to differ wherever
    values differ: between steps, batches, layers and devices. One round of a hash is enough for
    indices, whose multiples lie far apart already. Two elements share a hash, each has half of it.

    Args:
        shape: Shape of the array.
        salt: What selects the bits, from the function `salt`.

    Returns:
        uint32 array, whose upper 16 bits are random.
    """
    index = _index(shape, salt)
    return _pair_hash(index >> 1, salt) << ((index & 1 ^ 1) << 4)


def _pair_hash(pair: Array, salt: Array) -> Array:
    """Returns the hash of each pair of neighbours: its lower half is the first one's."""
    h = pair * jnp.uint32(GOLDEN) + salt
    return (h ^ (h >> 15) ^ (h >> 7)) * jnp.uint32(0x846CA68B)


def other_words(words: UInt32[Array, "*shape"], number: int) -> UInt32[Array, "*shape"]:
    """Derives other random bits from those of `indexed_words`, for another code of an element.

    Args:
        words: The random bits.
        number: Which code; the bits of code 0 are `words`.

    Returns:
        uint32 array, whose upper 16 bits are random, and uncorrelated with those of `words`.
    """
    return words * jnp.uint32(pow(0x2C1B3C6D, number, 2**32))


@functools.partial(_inlined, static_argnums=0)
def axis_words(shape: tuple[int, ...], seed: Seed) -> tuple[UInt32[Array, "..."], ...]:
    """Draws random bits for each index along each axis, for noise that is needed again.

    Args:
        shape: Shape of an array.
        seed: Integer scalar that selects the bits.

    Returns:
        For each axis an array of the rank of the array and of size 1 along all other axes. Slices
        of them are those of slices of the array.
    """
    salt = folded(seed, 1)
    indices = (lax.broadcasted_iota(jnp.uint32, _along(shape, i), i) for i in range(len(shape)))
    return tuple(_mix(index + folded(salt, i)) for i, index in enumerate(indices))


def _along(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return tuple(n if i == axis else 1 for i, n in enumerate(shape))


def of_axes(words: tuple[UInt32[Array, "..."], ...]) -> UInt32[Array, "*shape"]:
    """Returns the words that `axis_words` stand for, one for each element.

    Over the seeds each is uniform, and any two are independent, but not any four.
    """
    return sum(words[1:], words[0])


@_inlined
def folded(seed: Seed, number: int | Array) -> UInt32[Array, ""]:
    """Derives a new seed from a seed and a number, such as the number of an iteration.

    Args:
        seed: Integer scalar; None is 0.
        number: Integer scalar.

    Returns:
        The new seed.

    Example:
        >>> bool(folded(0, 1) == folded(1, 0))
        False
    """
    return _mix(_mix(_word(seed) + jnp.uint32(1)) + jnp.asarray(number).astype(jnp.uint32))


def _word(seed: Seed) -> Array:
    """Returns a seed as a word; None is 0."""
    return jnp.asarray(0 if seed is None else seed).astype(jnp.uint32)


def counted(seed: Seed, count: int, step: int) -> list[Array]:
    """Derives some seeds from one, at equal distances.

    Each is computed from the one before, behind a barrier. A seed of its own number would be a
    constant of the kernel that reads it, and XLA would compile the kernels of repeated layers anew
    for each layer.

    Args:
        seed: Integer scalar; None is 0.
        count: Number of seeds.
        step: Distance between them.

    Returns:
        uint32 scalars.

    Example:
        >>> len(counted(7, 3, step=1))
        3
    """
    last = _word(seed) * jnp.uint32(GOLDEN)
    made = []
    for _ in range(count):
        last = lax.optimization_barrier(last + jnp.uint32(step % 2**32))
        made.append(last)
    return made


def spot_check(*arrays: Inexact[Array, "..."]) -> UInt32[Array, ""]:
    """Hashes up to 1,024 elements of each array to a seed.

    Their places are spread over all axes, so padding at either end hides nothing beside it. An
    array of up to 1,024 elements is read as a whole, and so is each index of an axis of up to 1,024
    indices, at one place of it or more. Arrays that differ in 1% of their elements have other
    seeds, those that differ in a few may not. `fingerprint` reads all elements, which takes a pass
    over each array and, where one is sharded, a reduction over the devices.

    Args:
        *arrays: Floating-point or complex arrays.

    Returns:
        The seed.

    Example:
        >>> bool(spot_check(jnp.zeros((9, 9))) == spot_check(jnp.full((9, 9), 1e-7)))
        False
    """

    def check(*arrays: Array) -> Array:
        samples = jnp.concatenate([jnp.zeros(0), *(_sampled(a, PLACES) for a in arrays)])
        return _mix(_hash(samples, jnp.uint32(0)).sum(dtype=jnp.uint32))

    seed: Array = over_automatic_axes(check, arrays, like=jnp.zeros(()))
    return seed


def _sampled(x: Array, places: int) -> Array:
    """Returns some elements of an array, or all of a small one, as a vector of float32."""
    sample = lax.stop_gradient(x)
    if x.size > places:
        axes = tuple(range(x.ndim))
        sample = lax.gather(
            sample,
            _places(x.shape, places),
            lax.GatherDimensionNumbers((), collapsed_slice_dims=axes, start_index_map=axes),
            slice_sizes=(1,) * x.ndim,
            mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
        )
    sample = jnp.ravel(sample)
    if jnp.iscomplexobj(sample):
        sample = jnp.concatenate([sample.real, sample.imag])
    return sample.astype(jnp.float32)


@functools.lru_cache
def _places(shape: tuple[int, ...], count: int) -> Int32[np.ndarray, "places axes"]:
    """Returns the indices of some elements of an array.

    Along each axis they are evenly spaced, in an order of its own (a "Latin hypercube").
    """
    orders = [np.random.RandomState(axis).permutation(count) for axis in range(len(shape))]
    return (np.stack(orders, 1) * np.asarray(shape) // count).astype(np.int32)


def fingerprint(*arrays: Float[Array, "..."]) -> UInt32[Array, ""]:
    """Hashes arrays to a seed for `uniform` that changes when any value changes.

    Args:
        *arrays: float32, bfloat16 or float16 arrays.

    Returns:
        The seed.

    Example:
        >>> bool(fingerprint(jnp.zeros(2)) == fingerprint(jnp.array([0.0, 1e-7])))
        False
    """
    seed = jnp.uint32(0)
    for x in arrays:
        words = _hash(lax.stop_gradient(x), jnp.uint32(0))
        seed = _mix(seed ^ words.sum(dtype=jnp.uint32))  # a sum, which devices can reduce
    return seed
