"""Small unsigned integers in as few bytes as their bits need.

8 and 4 bits are XLA's own dtypes, which keep the array's layout and any odd size. Two 2-bit codes
share a `uint4`, since TPUs cannot keep XLA's own 2-bit arrays in a barrier; eight single bits share
a byte. 3 bits are 2 + 1.

Where codes share an element is chosen by what compilers fuse: single bits lie along the last axis,
so that a GPU packs them in the kernel that makes the array; 2-bit codes share across halves of an
outer axis, so that each half keeps the array's layout.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Integer, UInt

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
        >>> [(a.dtype.name, a.shape) for a in pack(jnp.arange(16), 3)]
        [('uint4', (8,)), ('uint8', (2,))]
    """
    if bits == 1:
        return (_pack_ones(codes),)
    if bits == 2:
        return (_pack_twos(codes),)
    if bits == 3:
        return _pack_twos(codes), _pack_ones(codes >> 2)
    return (codes.astype(jnp.uint4 if bits == 4 else jnp.uint8),)


def unpack(
    arrays: tuple[UInt[Array, "..."], ...], shape: tuple[int, ...], bits: int
) -> Integer[Array, "..."]:
    """Returns the int32 codes of this shape that `pack` stored."""
    if bits == 1:
        codes = _unpack_ones(arrays[0], shape)
    elif bits == 2:
        codes = _unpack_twos(arrays[0], shape)
    elif bits == 3:
        codes = _unpack_twos(arrays[0], shape) | (_unpack_ones(arrays[1], shape) << 2)
    else:
        (codes,) = arrays
    return codes.astype(jnp.int32)


def _pad(codes: Array, axis: int, multiple: int) -> Array:
    """`codes`, at least of one axis, as uint8 with one axis padded to a multiple."""
    codes = codes.reshape(codes.shape or (1,)).astype(jnp.uint8)
    padding = [(0, -n % multiple if i == axis else 0) for i, n in enumerate(codes.shape)]
    return jnp.pad(codes, padding)


def _unpad(codes: Array, axis: int, shape: tuple[int, ...]) -> Array:
    return lax.slice_in_dim(codes, 0, (shape or (1,))[axis], axis=axis).reshape(shape)


def _pack_ones(codes: Array) -> Array:
    codes = _pad(codes, max(codes.ndim - 1, 0), 8) & 1
    return lax.platform_dependent(codes, tpu=_bytes_by_matmul, default=_bytes_by_sum)


def _unpack_ones(packed: Array, shape: tuple[int, ...]) -> Array:
    bits = lax.platform_dependent(packed, tpu=_bits_by_matmul, default=_bits_by_shift)
    return _unpad(bits, max(len(shape) - 1, 0), shape)


def _bytes_by_sum(bits: Array) -> Array:
    bits = bits.reshape(*bits.shape[:-1], bits.shape[-1] // 8, 8)
    place = lax.broadcasted_iota(jnp.uint8, bits.shape, bits.ndim - 1)
    return jnp.sum(bits << place, -1, dtype=jnp.uint8)


def _bits_by_shift(packed: Array) -> Array:
    place = lax.broadcasted_iota(jnp.uint8, (*packed.shape, 8), packed.ndim)
    bits = (packed[..., None] >> place) & 1
    return bits.reshape(*packed.shape[:-1], 8 * packed.shape[-1])


def _bytes_by_matmul(bits: Array) -> Array:
    """`_bytes_by_sum` for TPUs, which move data between lanes by their matrix unit alone."""

    def gather(bits: Array) -> Array:
        return _product(bits, _places(bits.shape[-1])).astype(jnp.uint8)

    return _by_blocks(bits, 1024, gather)


def _bits_by_matmul(packed: Array) -> Array:
    """`_bits_by_shift` for TPUs."""

    def spread(packed: Array) -> Array:
        repeated = _product(packed, _places(8 * packed.shape[-1]).T > 0)
        place = lax.broadcasted_iota(jnp.int32, repeated.shape, repeated.ndim - 1) % 8
        return ((repeated >> place) & 1).astype(jnp.uint8)

    return _by_blocks(packed, 128, spread)


def _by_blocks(x: Array, size: int, fn: Callable[[Array], Array]) -> Array:
    """Maps `fn` over blocks of the last axis, so that products stay small next to the layer's."""
    blocks = jnp.split(x, tuple(range(size, x.shape[-1], size)), axis=-1)
    return jnp.concatenate([fn(block) for block in blocks], axis=-1)


def _places(bits: int) -> Array:
    """The matrix that makes bytes of bits: bit i has the value 2^(i % 8) in byte i // 8."""
    bit, byte = (lax.broadcasted_iota(jnp.int32, (bits, bits // 8), axis) for axis in (0, 1))
    return jnp.where(bit // 8 == byte, 1 << (bit % 8), 0)


def _product(x: Array, matrix: Array) -> Array:
    """The int32 product of integers below 2^8, with sums below 2^8: exact in bfloat16."""
    x, matrix = (a.astype(jnp.int32).astype(jnp.bfloat16) for a in (x, matrix))
    return jnp.dot(x, matrix, preferred_element_type=jnp.float32).astype(jnp.int32)


def _halved_axis(shape: tuple[int, ...]) -> int:
    """The axis whose halves share elements: least padding, then the outermost.

    Never the batch axis where there is another, since packing along a sharded axis communicates.
    """
    axes = range(min(1, len(shape) - 1), len(shape))
    return min(axes, key=lambda axis: shape[axis] % 2 / max(shape[axis], 1))


def _pack_twos(codes: Array) -> Array:
    axis = _halved_axis(codes.shape or (1,))
    low, high = jnp.split(_pad(codes, axis, 2) & 3, 2, axis)
    return (low | (high << 2)).astype(jnp.uint4)


def _unpack_twos(packed: Array, shape: tuple[int, ...]) -> Array:
    axis = _halved_axis(shape or (1,))

    def concatenated(packed: Array) -> Array:
        packed = packed.astype(jnp.uint8)
        return jnp.concatenate([packed & 3, packed >> 2], axis)

    def shifted(packed: Array) -> Array:  # what XLA for GPUs fuses; that for TPUs does the other
        wide = (*packed.shape[:axis], 2, *packed.shape[axis:])
        place = lax.broadcasted_iota(jnp.uint8, wide, axis) * 2
        codes = (jnp.expand_dims(packed.astype(jnp.uint8), axis) >> place) & 3
        return codes.reshape(*packed.shape[:axis], 2 * packed.shape[axis], *wide[axis + 2 :])

    codes = lax.platform_dependent(packed, tpu=concatenated, default=shifted)
    return _unpad(codes, axis, shape)
