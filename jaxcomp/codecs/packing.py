"""Packs small unsigned integers into as few bytes as their bits need.

Codes of 8 and 4 bits use XLA's own dtypes, which keep the array's layout and any odd size. Two
2-bit codes share a `uint4`, because an optimisation barrier on a TPU cannot hold XLA's own 2-bit
arrays. Eight 1-bit codes share a byte. 3-bit codes are stored as 2 bits and 1 bit. Neighbours along
the last axis share an element.

No array has the dtype `uint2`. Where a kernel of an NVIDIA GPU takes a sum of rows and accesses two
elements at once, XLA reads and writes the lower half of a byte for both pairs of `uint2`s in it
(seen with JAX 0.10 and 0.11). Codes of a byte are joined by a sum, so one thread writes the byte.
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int8, Int32, Integer, UInt

from jaxcomp._core import platforms

WIDTHS = (1, 2, 3, 4, 8)
_SHARING = {1: (jnp.uint8, 8), 2: (jnp.uint4, 2)}  # dtype of the shared element, codes in it


def check_bits(bits: int) -> None:
    """Checks a number of bits.

    Args:
        bits: The number of bits.

    Raises:
        ValueError: If `bits` is not 1, 2, 3, 4 or 8.
    """
    if type(bits) is not int or bits not in WIDTHS:
        raise ValueError(f"bits={bits!r}: expected one of {WIDTHS}")


def pack(
    codes: Bool[Array, "*shape"] | Integer[Array, "*shape"], bits: int
) -> tuple[UInt[Array, "..."], ...]:
    """Packs integers in [0, 2^bits).

    Args:
        codes: Integer or boolean array of any shape.
        bits: Bits per element: 1, 2, 3, 4 or 8.

    Returns:
        One array, or two for 3 bits.

    Example:
        >>> [(a.dtype.name, a.shape) for a in pack(jnp.arange(16), 3)]
        [('uint4', (8,)), ('uint8', (2,))]
    """
    if bits == 3:
        by_sum = _two_and_one_bit_by_sum
        return platforms.pack_by_platform(codes, tpu=_two_and_one_bit, other=by_sum)
    if bits == 8:
        return (codes.astype(jnp.uint8),)
    if bits == 4:
        return (platforms.pack_by_platform(codes & 15, tpu=_convert_by_float, other=_convert),)
    _, sharing = _SHARING[bits]
    padded = _padded(codes, bits, 8 // bits, jnp.uint8)
    tpu, other = (functools.partial(join, bits) for join in (_join_by_matmul, _join_by_sum))
    joined = platforms.pack_by_platform(padded, tpu=tpu, other=other)
    return (joined[..., : -(-(codes.shape or (1,))[-1] // sharing)],)


def unpack(
    arrays: tuple[UInt[Array, "..."], ...], shape: tuple[int, ...], bits: int
) -> Integer[Array, "..."]:
    """Unpacks integers that `pack` packed.

    Args:
        arrays: Result of `pack`.
        shape: Shape of the integers.
        bits: Bits per element, as given to `pack`.

    Returns:
        int32 array of this shape.
    """
    if bits == 3:
        return unpack(arrays[:1], shape, 2) | (unpack(arrays[1:], shape, 1) << 2)
    (codes,) = arrays
    if bits in _SHARING:
        codes = _unpack_last(codes, shape, bits)
    return codes.astype(jnp.int32)


def map_codes(
    function: Callable[[Int32[Array, "..."]], Int8[Array, "..."]],
    codes: UInt[Array, "..."],
) -> Int8[Array, "..."]:
    """Applies a function to each 4-bit code, several codes at once.

    On a GPU a thread of a kernel computes four elements. Four codes in a word of 16 bits are one
    element, so a thread reads 8 bytes instead of 2, and the kernel takes less than half the time.

    Args:
        function: An elementwise function of codes.
        codes: uint4 array, the result of `pack`.

    Returns:
        int8 array of the shape of `codes`.

    Example:
        >>> (codes,) = pack(jnp.arange(4), 4)
        >>> map_codes(lambda codes: (10 * codes).astype(jnp.int8), codes).tolist()
        [0, 10, 20, 30]
    """
    if not codes.ndim or codes.shape[-1] % 4:
        return function(codes.astype(jnp.int32))
    words = lax.bitcast_convert_type(_in_groups(codes, 4), jnp.uint16).astype(jnp.int32)
    mapped = (function(words >> 4 * i & 15).astype(jnp.uint8) for i in range(4))
    joined = functools.reduce(
        jnp.bitwise_or, (value.astype(jnp.uint32) << 8 * i for i, value in enumerate(mapped))
    )
    return lax.bitcast_convert_type(joined, jnp.int8).reshape(codes.shape)


def _two_and_one_bit(codes: Array) -> tuple[Array, ...]:
    """Splits 3-bit codes into 2 bits and 1 bit, each packed."""
    return *pack(codes & 3, 2), *pack(codes >> 2, 1)


def _two_and_one_bit_by_sum(codes: Array) -> tuple[Array, ...]:
    """Computes `_two_and_one_bit` by one sum of eight codes, except on TPUs.

    The codes have one reader, the sum: two would make XLA write them to memory with 32 bits each.
    """
    count = (codes.shape or (1,))[-1]
    eight = _in_groups(_padded(codes, 3, 8, jnp.uint32), 8)
    parts = (eight & 3) << _places(eight, 2) | (eight >> 2) << (_places(eight, 1) + 16)
    joined = jnp.sum(parts, -1, dtype=jnp.uint32)
    low = lax.bitcast_convert_type(joined.astype(jnp.uint16), jnp.uint4)
    low = low.reshape(*joined.shape[:-1], 4 * joined.shape[-1])[..., : -(-count // 2)]
    return low, (joined >> 16).astype(jnp.uint8)


def _places(x: Array, bits: int) -> Array:
    """Returns the position of the first bit of each element along the last axis."""
    return lax.broadcasted_iota(x.dtype, x.shape, x.ndim - 1) * bits


def _convert(codes: Array) -> Array:
    return codes.astype(jnp.uint4)


def _convert_by_float(codes: Array) -> Array:
    """Computes `_convert` for TPUs, which then compute several codes of an array in one kernel.

    Without the 0.5, which truncation removes, XLA would convert the integers directly.
    """
    return (codes.astype(jnp.float32) + 0.5).astype(jnp.uint4)


def _padded(codes: Array, bits: int, sharing: int, dtype: DTypeLike) -> Array:
    """Makes the last axis a multiple of the codes that share an element."""
    codes = codes.reshape(codes.shape or (1,)).astype(dtype) & (2**bits - 1)
    padding = [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % sharing)]
    return jnp.pad(codes, padding)


def _unpack_last(packed: Array, shape: tuple[int, ...], bits: int) -> Array:
    tpu, other = (functools.partial(split, bits) for split in (_split_by_matmul, _split_by_shift))
    codes = platforms.pack_by_platform(packed, tpu=tpu, other=other)
    return lax.slice_in_dim(codes, 0, (shape or (1,))[-1], axis=-1).reshape(shape)


def _in_groups(codes: Array, sharing: int) -> Array:
    """Splits the last axis into the codes that share an element."""
    return codes.reshape(*codes.shape[:-1], codes.shape[-1] // sharing, sharing)


def _join_by_sum(bits: int, codes: Array) -> Array:
    of_byte = _in_groups(codes, 8 // bits)
    joined = jnp.sum(of_byte << _places(of_byte, bits), -1, dtype=jnp.uint8)
    if bits == 1:
        return joined
    pairs = lax.bitcast_convert_type(joined, jnp.uint4)
    return pairs.reshape(*joined.shape[:-1], 2 * joined.shape[-1])


def _split_by_shift(bits: int, packed: Array) -> Array:
    _, sharing = _SHARING[bits]
    count = sharing * packed.shape[-1]
    if bits == 2:
        pairs = jnp.pad(packed, [(0, 0)] * (packed.ndim - 1) + [(0, packed.shape[-1] % 2)])
        packed = lax.bitcast_convert_type(_in_groups(pairs, 2), jnp.uint8)
    each = jnp.broadcast_to(packed[..., None], (*packed.shape, 8 // bits))
    codes = (each >> _places(each, bits)) & (2**bits - 1)
    return codes.reshape(*packed.shape[:-1], 8 // bits * packed.shape[-1])[..., :count]


def _join_by_matmul(bits: int, codes: Array) -> Array:
    """Computes `_join_by_sum` for TPUs, which move data across lanes fastest by matrix products."""

    def join(codes: Array) -> Array:
        return _product(codes, _factors(codes.shape[-1], bits)).astype(jnp.uint8)

    dtype, sharing = _SHARING[bits]
    return _by_blocks(codes, 128 * sharing, join).astype(dtype)


def _split_by_matmul(bits: int, packed: Array) -> Array:
    """Computes `_split_by_shift` for TPUs."""
    _, sharing = _SHARING[bits]
    packed = packed.astype(jnp.uint8)

    def split(packed: Array) -> Array:
        repeated = _product(packed, _factors(sharing * packed.shape[-1], bits).T > 0)
        place = lax.broadcasted_iota(jnp.int32, repeated.shape, repeated.ndim - 1)
        place = lax.rem(place, lax.full_like(place, sharing)) * bits
        return ((repeated >> place) & (2**bits - 1)).astype(jnp.uint8)

    return _by_blocks(packed, 128, split)


def _by_blocks(x: Array, size: int, fn: Callable[[Array], Array]) -> Array:
    """Applies `fn` to blocks of the last axis, so that its products are small."""
    blocks = jnp.split(x, tuple(range(size, x.shape[-1], size)), axis=-1)
    return jnp.concatenate([fn(block) for block in blocks], axis=-1)


def _factors(count: int, bits: int) -> Array:
    """Returns the matrix that joins codes: the factor of each code in the element it shares."""
    _, sharing = _SHARING[bits]
    code, joined = (lax.broadcasted_iota(jnp.int32, (count, count // sharing), i) for i in (0, 1))
    each = lax.full_like(code, sharing)
    return jnp.where(lax.div(code, each) == joined, 1 << lax.rem(code, each) * bits, 0)


def _product(x: Array, matrix: Array) -> Array:
    """Returns the int32 product of integers below 2^8 with sums below 2^8; exact in bfloat16."""
    x, matrix = (a.astype(jnp.int32).astype(jnp.bfloat16) for a in (x, matrix))
    return jnp.dot(x, matrix, preferred_element_type=jnp.float32).astype(jnp.int32)
