"""Packs small unsigned integers into as few bytes as their bits need.

Codes of 8 and 4 bits use XLA's own dtypes, which keep the array's layout and any odd size. Two
2-bit codes share a `uint4`, because an optimisation barrier on a TPU cannot hold XLA's own 2-bit
arrays. Eight 1-bit codes share a byte. Codes of 3, 5 and 6 bits are stored in two parts, of 2 and
1, 4 and 1, 4 and 2 bits. Neighbours along the last axis share an element.

No array has the dtype `uint2`. Where a kernel of an NVIDIA GPU takes a sum of rows and accesses two
elements at once, XLA reads and writes the lower half of a byte for both pairs of `uint2`s in it
(seen with JAX 0.10 and 0.11). Codes of a byte are joined by a sum, so one thread writes the byte.

`pack` and `unpack` are calls in a traced function: `_core.rows` reads each as one operation.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int8, Int32, Integer, UInt

from jaxcomp._core import platforms


@dataclasses.dataclass(frozen=True)
class _Part:
    """Some bits of each code, and what stores them.

    Attributes:
        bits: The bits.
        dtype: Dtype of the stored elements.
        sharing: Codes that share an element.
    """

    bits: int
    dtype: DTypeLike
    sharing: int


_ONE, _TWO = _Part(1, jnp.uint8, 8), _Part(2, jnp.uint4, 2)
_FOUR, _EIGHT = _Part(4, jnp.uint4, 1), _Part(8, jnp.uint8, 1)
_PARTS = {
    1: (_ONE,),
    2: (_TWO,),
    3: (_TWO, _ONE),
    4: (_FOUR,),
    5: (_FOUR, _Part(1, jnp.uint4, 4)),
    6: (_FOUR, _TWO),
    8: (_EIGHT,),
}
WIDTHS = tuple(_PARTS)


def check_bits(bits: int) -> None:
    """Checks a number of bits.

    Args:
        bits: The number of bits.

    Raises:
        ValueError: If `bits` is not 1, 2, 3, 4, 5, 6 or 8.
    """
    if type(bits) is not int or bits not in WIDTHS:
        raise ValueError(f"bits={bits!r}: expected one of {WIDTHS}")


@functools.partial(jax.jit, static_argnames="bits")
def pack(
    codes: Bool[Array, "*shape"] | Integer[Array, "*shape"], bits: int
) -> tuple[UInt[Array, "..."], ...]:
    """Packs integers in [0, 2^bits).

    Args:
        codes: Integer or boolean array of any shape.
        bits: Bits per element: 1, 2, 3, 4, 5, 6 or 8.

    Returns:
        One array, or two for 3, 5 and 6 bits.

    Example:
        >>> [(a.dtype.name, a.shape) for a in pack(jnp.arange(16), 3)]
        [('uint4', (8,)), ('uint8', (2,))]
    """
    if len(_PARTS[bits]) > 1:
        codes = codes.reshape(codes.shape or (1,))
        tpu, other = (functools.partial(form, bits) for form in (_each_part, _parts_by_sum))
        return platforms.pack_by_platform(codes, tpu=tpu, other=other)
    return _each_part(bits, codes)


@functools.partial(jax.jit, static_argnames=("shape", "bits"))
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
    parts = [
        _unpack_part(part, array, shape).astype(jnp.int32).reshape(shape)
        for part, array in zip(_PARTS[bits], arrays, strict=True)
    ]
    return parts[0] if len(parts) == 1 else parts[0] | parts[1] << _PARTS[bits][0].bits


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


def _each_part(bits: int, codes: Array) -> tuple[Array, ...]:
    """Packs the parts of codes one by one."""
    low, *high = _PARTS[bits]
    return _pack_part(low, codes), *(_pack_part(part, codes >> low.bits) for part in high)


def _parts_by_sum(bits: int, codes: Array) -> tuple[Array, Array]:
    """Computes `_each_part` of two parts by one sum of four or eight codes, except on TPUs.

    The codes have one reader, the sum: two would make XLA write them to memory with 32 bits each.
    """
    low, high = _PARTS[bits]
    together = 16 // low.bits
    group = _in_groups(_padded(codes, bits, together, jnp.uint32), together)
    lower = (group & (2**low.bits - 1)) << _places(group, low.bits)
    upper = (group >> low.bits) << (_places(group, high.bits) + 16)
    words, count = jnp.sum(lower | upper, -1, dtype=jnp.uint32), codes.shape[-1]
    parts = (words, low), (words >> 16, high)
    lower, upper = (_elements(word, together, part, count) for word, part in parts)
    return lower, upper


def _elements(words: Array, together: int, part: _Part, count: int) -> Array:
    """Returns the stored elements of words with a part of some codes in their lower bits."""
    if together == part.sharing:
        elements = words.astype(part.dtype)
    else:
        integer = f"uint{together * part.bits}"
        several = lax.bitcast_convert_type(words.astype(integer), part.dtype)
        elements = several.reshape(*words.shape[:-1], words.shape[-1] * several.shape[-1])
    return elements[..., : -(-count // part.sharing)]


def _pack_part(part: _Part, codes: Array) -> Array:
    if part is _EIGHT:
        return codes.astype(jnp.uint8)
    if part is _FOUR:
        return platforms.pack_by_platform(codes & 15, tpu=_convert_by_float, other=_convert)
    padded = _padded(codes, part.bits, 8 // part.bits, jnp.uint8)
    tpu, other = (functools.partial(join, part) for join in (_join_by_matmul, _join_by_sum))
    joined = platforms.pack_by_platform(padded, tpu=tpu, other=other)
    return joined[..., : -(-(codes.shape or (1,))[-1] // part.sharing)]


def _unpack_part(part: _Part, packed: Array, shape: tuple[int, ...]) -> Array:
    if part.sharing == 1:
        return packed
    tpu, other = (functools.partial(split, part) for split in (_split_by_matmul, _split_by_shift))
    codes = platforms.pack_by_platform(packed, tpu=tpu, other=other)
    return lax.slice_in_dim(codes, 0, (shape or (1,))[-1], axis=-1)


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


def _in_groups(codes: Array, sharing: int) -> Array:
    """Splits the last axis into the codes that share an element."""
    return codes.reshape(*codes.shape[:-1], codes.shape[-1] // sharing, sharing)


def _join_by_sum(part: _Part, codes: Array) -> Array:
    of_byte = _in_groups(codes, 8 // part.bits)
    joined = jnp.sum(of_byte << _places(of_byte, part.bits), -1, dtype=jnp.uint8)
    if part.dtype == jnp.uint8:
        return joined
    pairs = lax.bitcast_convert_type(joined, jnp.uint4)
    return pairs.reshape(*joined.shape[:-1], 2 * joined.shape[-1])


def _split_by_shift(part: _Part, packed: Array) -> Array:
    of_byte, count = 8 // part.bits, part.sharing * packed.shape[-1]
    if part.dtype == jnp.uint4:
        pairs = jnp.pad(packed, [(0, 0)] * (packed.ndim - 1) + [(0, packed.shape[-1] % 2)])
        packed = lax.bitcast_convert_type(_in_groups(pairs, 2), jnp.uint8)
    each = jnp.broadcast_to(packed[..., None], (*packed.shape, of_byte))
    codes = (each >> _places(each, part.bits)) & (2**part.bits - 1)
    return codes.reshape(*packed.shape[:-1], of_byte * packed.shape[-1])[..., :count]


def _join_by_matmul(part: _Part, codes: Array) -> Array:
    """Computes `_join_by_sum` for TPUs, which move data across lanes fastest by matrix products."""

    def join(codes: Array) -> Array:
        return _product(codes, _factors(codes.shape[-1], part)).astype(jnp.uint8)

    return _by_blocks(codes, 128 * part.sharing, join).astype(part.dtype)


def _split_by_matmul(part: _Part, packed: Array) -> Array:
    """Computes `_split_by_shift` for TPUs."""

    def split(packed: Array) -> Array:
        repeated = _product(packed, _factors(part.sharing * packed.shape[-1], part).T > 0)
        place = lax.broadcasted_iota(jnp.int32, repeated.shape, repeated.ndim - 1)
        place = lax.rem(place, lax.full_like(place, part.sharing)) * part.bits
        return ((repeated >> place) & (2**part.bits - 1)).astype(jnp.uint8)

    return _by_blocks(packed.astype(jnp.uint8), 128, split)


def _by_blocks(x: Array, size: int, fn: Callable[[Array], Array]) -> Array:
    """Applies `fn` to blocks of the last axis, so that its products are small."""
    blocks = jnp.split(x, tuple(range(size, x.shape[-1], size)), axis=-1)
    return jnp.concatenate([fn(block) for block in blocks], axis=-1)


def _factors(count: int, part: _Part) -> Array:
    """Returns the matrix that joins codes: the factor of each code in the element it shares."""
    shape = count, count // part.sharing
    code, joined = (lax.broadcasted_iota(jnp.int32, shape, i) for i in (0, 1))
    each = lax.full_like(code, part.sharing)
    return jnp.where(lax.div(code, each) == joined, 1 << lax.rem(code, each) * part.bits, 0)


def _product(x: Array, matrix: Array) -> Array:
    """Returns the int32 product of integers below 2^8 with sums below 2^8; exact in bfloat16."""
    x, matrix = (a.astype(jnp.int32).astype(jnp.bfloat16) for a in (x, matrix))
    return jnp.dot(x, matrix, preferred_element_type=jnp.float32).astype(jnp.int32)
