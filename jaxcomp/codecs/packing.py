"""Small unsigned integers in as few bytes as their bits need.

4 and 2 bits use XLA's own sub-byte dtypes, which keep the array's layout and any odd size. XLA has
no 1-bit dtype: eight bits that lie along one axis go into one byte. 3 bits are 2 + 1.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Integer, UInt

NATIVE = {2: jnp.uint2, 4: jnp.uint4, 8: jnp.uint8}
WIDTHS = (1, 2, 3, 4, 8)


def check_bits(bits: int) -> None:
    """Raises a ValueError unless `bits` is a width that can be packed."""
    if type(bits) is not int or bits not in WIDTHS:
        raise ValueError(f"bits={bits!r}: expected one of {WIDTHS}")


def pack(
    codes: Bool[Array, "*shape"] | Integer[Array, "*shape"], bits: int
) -> tuple[UInt[Array, "..."], ...]:
    """Packs integers in [0, 2^bits).

    Args:
        codes: Array of any shape, of integers or booleans.
        bits: 1, 2, 3, 4 or 8.

    Returns:
        One array, or two for 3 bits.

    Example:
        >>> [a.dtype.name for a in pack(jnp.arange(8), 3)]
        ['uint2', 'uint8']
    """
    if bits == 1:
        return (_pack_bits(codes),)
    if bits == 3:
        return (codes & 3).astype(jnp.uint2), _pack_bits(codes >> 2)
    return (codes.astype(NATIVE[bits]),)


def unpack(
    arrays: tuple[UInt[Array, "..."], ...], shape: tuple[int, ...], bits: int
) -> Integer[Array, "..."]:
    """Returns the int32 codes of this shape that `pack` stored."""
    if bits == 1:
        return _unpack_bits(arrays[0], shape)
    if bits == 3:
        return arrays[0].astype(jnp.int32) | (_unpack_bits(arrays[1], shape) << 2)
    return arrays[0].astype(jnp.int32)


def _pack_axis(shape: tuple[int, ...]) -> int:
    """The axis along which eight bits share a byte: least padding, then the outermost.

    Never the batch axis where there is another, since packing along a sharded axis communicates.
    """
    axes = range(min(1, len(shape) - 1), len(shape))
    return min(axes, key=lambda axis: -shape[axis] % 8 / max(shape[axis], 1))


def _pack_bits(codes: Array) -> Array:
    shape = codes.shape or (1,)
    axis = _pack_axis(shape)
    padding = [(0, -n % 8 if i == axis else 0) for i, n in enumerate(shape)]
    codes = jnp.pad(codes.reshape(shape).astype(jnp.uint8) & 1, padding)
    size = codes.shape[axis] // 8
    codes = codes.reshape(*shape[:axis], 8, size, *shape[axis + 1 :])
    place = lax.broadcasted_iota(jnp.uint8, codes.shape, axis)
    return jnp.sum(codes << place, axis, dtype=jnp.uint8)


def _unpack_bits(packed: Array, shape: tuple[int, ...]) -> Array:
    full = shape or (1,)
    axis = _pack_axis(full)
    wide = (*packed.shape[:axis], 8, *packed.shape[axis:])
    place = lax.broadcasted_iota(jnp.uint8, wide, axis)
    codes = (jnp.expand_dims(packed, axis) >> place) & 1
    codes = codes.reshape(*full[:axis], 8 * packed.shape[axis], *full[axis + 1 :])
    return lax.slice_in_dim(codes, 0, full[axis], axis=axis).reshape(shape).astype(jnp.int32)
