"""Exact storage of masks and small indices."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxcomp._core.integers import as_integer
from jaxcomp.codecs import packing
from jaxcomp.codecs._codec import Codec, Seed


@dataclasses.dataclass(frozen=True)
class Packed(Codec):
    """Stores booleans or integers in [0, 2^bits) exactly, in `bits` bits per element.

    Values are not checked. A value outside of the range loses its upper bits.

    Attributes:
        bits: Bits per element: 1, 2, 3, 4, 5, 6 or 8.

    Raises:
        ValueError: If `bits` is none of these.

    Example:
        >>> Packed(bits=1).nbytes((4, 64), jnp.bool)
        32
        >>> Packed(bits=4).decode(Packed(bits=4).encode(jnp.array([3, 9]))).tolist()
        [3, 9]
    """

    bits: int = 1
    name: ClassVar[str] = "packed"
    kinds = ("relu", "dropout", "max_pool")
    unbiased = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", as_integer(self.bits))
        packing.check_bits(self.bits)

    def check(self, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        """Checks that the array holds booleans or integers.

        Args:
            shape: Shape of the array; any shape can be stored.
            dtype: Dtype of the array.

        Raises:
            TypeError: If `dtype` is neither boolean nor integer.
        """
        if not jnp.issubdtype(dtype, jnp.integer) and jnp.dtype(dtype) != jnp.bool:
            raise TypeError(
                f"Packed stores booleans and integers; got x of dtype {jnp.dtype(dtype).name}"
            )

    def _encode(self, x: Array, seed: Seed) -> tuple[Array, ...]:
        return packing.pack(x, self.bits)

    def _decode(self, arrays: tuple[Array, ...], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        return packing.unpack(arrays, shape, self.bits).astype(dtype)
