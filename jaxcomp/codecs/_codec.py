"""The codec contract: one array -> fewer bytes -> one array of the same shape and dtype."""

import abc
import dataclasses
import math
import typing

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Shaped

FLOATS = ("float32", "bfloat16", "float16")

Seed = ArrayLike | None


def array_nbytes(shape: tuple[int, ...], dtype: DTypeLike) -> int:
    """Bytes that XLA stores for an array, sub-byte dtypes packed (`.nbytes` of JAX is not).

    Args:
        shape: Shape of the array.
        dtype: Its dtype.

    Returns:
        Bytes, rounded up to whole bytes.

    Example:
        >>> array_nbytes((3, 5), jnp.uint4)
        8
    """
    return -(-math.prod(shape) * jax.dtypes.itemsize_bits(dtype) // 8)


def channel_axes(rank: int) -> tuple[int, ...]:
    """The axes along which the values of one channel of one sample lie.

    Of arrays of fewer than 3 axes those of one sample.

    Example:
        >>> channel_axes(4), channel_axes(2), channel_axes(1)
        ((1, 2), (1,), (0,))
    """
    return tuple(range(1, rank - 1) if rank > 2 else range(1 if rank > 1 else 0, rank))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Encoded:
    """An array as a codec stores it.

    Attributes:
        arrays: The stored arrays, or tuples of them, in the codec's own order; the leaves of this
            pytree.
        shape: Shape of the array that was encoded.
        dtype: Its dtype.
    """

    arrays: tuple[typing.Any, ...]  # JAX puts shapes, specs and the like in place of arrays, too
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    dtype: jnp.dtype = dataclasses.field(metadata={"static": True})

    @property
    def nbytes(self) -> int:
        """Bytes of the stored arrays, sub-byte dtypes packed."""
        return sum(array_nbytes(a.shape, a.dtype) for a in jax.tree.leaves(self.arrays))


class Codec(abc.ABC):
    """Stores one floating-point array in fewer bytes.

    A codec is a frozen, hashable dataclass of static choices. Axis 0 of an array is the batch: a
    codec never mixes samples, so a batch sharded over devices needs no communication. NaN and Inf
    come back as non-finite values.

    Attributes:
        name: The codec's name in specs and in the names of stored arrays.
        kinds: The kinds of operation of `jaxcomp.nn` that may store by it, for rules; see
            `nn.Coded`.
        unbiased: Whether the mean of `decode(encode(x, seed))` over seeds is x.
        is_exact: Whether decoding returns the array itself, so that second derivatives exist.
        on_host: Whether the code waits in the host's memory.
        fuses_decode_on_tpu: Whether XLA for TPUs, left alone, decodes in each kernel that reads
            the array, and so writes it nowhere. Then no barrier holds the code back there. What
            waits on the host has to be held back: `Offload` of such a codec is not one.
    """

    name: typing.ClassVar[str]
    kinds: typing.ClassVar[tuple[str, ...]] = (
        "conv",
        "dot",
        "batch_norm",
        "layer_norm",
        "gelu",
        "silu",
        "affine",
    )
    unbiased: bool
    is_exact: typing.ClassVar[bool] = False
    on_host: typing.ClassVar[bool] = False
    fuses_decode_on_tpu: bool = False

    @classmethod
    def stored_name(cls) -> str:
        """`jaxcomp/<codec>`: scope of what makes and reads codes, and name of the stored arrays."""
        return f"jaxcomp/{cls.name}"

    def encode(
        self,
        x: Shaped[Array, "..."],
        seed: Seed = None,
        importance: Float[Array, " batch"] | None = None,
    ) -> Encoded:
        """Encodes an array.

        Args:
            x: Array of any shape, float32, bfloat16 or float16.
            seed: Integer scalar that redraws the rounding noise; codecs without noise ignore it.
            importance: Of each sample; only codecs that give samples different bits read it.

        Returns:
            The stored arrays with the shape and dtype of `x`.

        Raises:
            TypeError: If `x` is of another dtype.
            ValueError: If the codec cannot store this shape.
        """
        self.check(x.shape, x.dtype)
        with jax.named_scope(self.stored_name()):
            return Encoded(self._encode(x, seed), x.shape, x.dtype)

    def decode(self, encoded: Encoded) -> Shaped[Array, "..."]:
        """Returns the array that `encoded` stands for, in its own shape and dtype."""
        with jax.named_scope(self.stored_name()):
            return self._decode(encoded.arrays, encoded.shape, encoded.dtype)

    def nbytes(self, shape: tuple[int, ...], dtype: DTypeLike) -> int:
        """Exact bytes stored for an array of this shape and dtype, metadata and padding included.

        Raises:
            TypeError: If `dtype` is not float32, bfloat16 or float16.
            ValueError: If the codec cannot store this shape.
        """
        self.check(shape, dtype)
        x = jax.ShapeDtypeStruct(shape, dtype)
        return jax.eval_shape(self.encode, x).nbytes

    def check(self, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        """Raises an error if an array of this shape and dtype cannot be stored."""
        name = jnp.dtype(dtype).name
        if name not in FLOATS:
            raise TypeError(f"{type(self).__name__} stores {FLOATS}; got x of dtype {name}")

    @abc.abstractmethod
    def _encode(self, x: Array, seed: Seed) -> tuple[Array, ...]: ...

    @abc.abstractmethod
    def _decode(
        self, arrays: tuple[typing.Any, ...], shape: tuple[int, ...], dtype: DTypeLike
    ) -> Array: ...


@dataclasses.dataclass(frozen=True)
class Exact(Codec):
    """Stores the array as it is.

    Example:
        >>> Exact().nbytes((2, 3), jnp.float32)
        24
    """

    name: typing.ClassVar[str] = "exact"
    kinds = (*Codec.kinds, "relu", "dropout", "max_pool", "norm_act")
    unbiased = True
    is_exact = True

    def _encode(self, x: Array, seed: Seed) -> tuple[Array, ...]:
        return (x,)

    def _decode(self, arrays: tuple[Array, ...], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        return arrays[0]


@dataclasses.dataclass(frozen=True)
class Cast(Codec):
    """Stores the array in another floating-point dtype, rounded to nearest.

    Biased: rounding is deterministic. Error bound: half a unit in the last place of `dtype`; values
    beyond its range become Inf (or NaN where the dtype has no Inf).

    Attributes:
        dtype: The stored dtype, e.g. "bfloat16", "float16", "float8_e4m3fn".

    Raises:
        TypeError: If `dtype` is not a floating-point dtype of at most 32 bits, or, when it is used,
            if it is wider than the array's.

    Example:
        >>> Cast("bfloat16").nbytes((2, 3), jnp.float32)
        12
    """

    dtype: str = "bfloat16"
    name: typing.ClassVar[str] = "cast"
    unbiased = False

    def __post_init__(self) -> None:
        try:
            name = jnp.dtype(self.dtype).name
        except TypeError:
            name = None
        if self.dtype is None or name is None or not jnp.issubdtype(name, jnp.floating):
            raise TypeError(f"dtype={self.dtype!r}: expected the name of a floating-point dtype")
        if jax.dtypes.itemsize_bits(name) > 32:
            raise TypeError(f"dtype={self.dtype!r}: expected at most 32 bits")
        object.__setattr__(self, "dtype", name)

    def check(self, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        """Raises an error if an array of this dtype cannot be stored, or would need more bytes."""
        super().check(shape, dtype)
        if jax.dtypes.itemsize_bits(self.dtype) > jax.dtypes.itemsize_bits(dtype):
            raise TypeError(f"{self}: wider than x of dtype {jnp.dtype(dtype).name}")

    def _encode(self, x: Array, seed: Seed) -> tuple[Array, ...]:
        return (x.astype(self.dtype),)

    def _decode(self, arrays: tuple[Array, ...], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        return arrays[0].astype(dtype)
