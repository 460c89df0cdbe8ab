"""The interface of codecs, and the two codecs that do not quantize: `Exact` and `Cast`."""

import abc
import dataclasses
import functools
import math
import reprlib
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Shaped

from jaxcomp._core.barriers import undifferentiable
from jaxcomp._core.explicit import explicit_axes, over_automatic_axes
from jaxcomp._core.integers import as_seed

FLOATS = ("float32", "bfloat16", "float16")

Seed = ArrayLike | None


def array_nbytes(shape: tuple[int, ...], dtype: DTypeLike) -> int:
    """Returns the bytes that XLA allocates for an array.

    Sub-byte dtypes are packed. The `nbytes` attribute of a JAX array does not count them packed.

    Args:
        shape: Shape of the array.
        dtype: Dtype of the array.

    Returns:
        Size in bytes, rounded up to whole bytes.

    Example:
        >>> array_nbytes((3, 5), jnp.uint4)
        8
    """
    return -(-math.prod(shape) * jax.dtypes.itemsize_bits(dtype) // 8)


def channel_axes(rank: int) -> tuple[int, ...]:
    """Returns the axes over which the values of one channel of one sample lie.

    For arrays of fewer than 3 axes, these are the axes of one sample.

    Args:
        rank: Number of axes of the array; the first is the batch, the last the channels.

    Returns:
        The axes.

    Example:
        >>> channel_axes(4), channel_axes(2), channel_axes(1)
        ((1, 2), (1,), (0,))
    """
    return tuple(range(1, rank - 1) if rank > 2 else range(1 if rank > 1 else 0, rank))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Encoded:
    """An array in the form in which a codec stores it. A pytree; its leaves are the stored arrays.

    Attributes:
        arrays: The stored arrays, or tuples of them, in an order that the codec defines.
        shape: Shape of the array that was encoded.
        dtype: Dtype of the array that was encoded.
        codec: Codec that encoded it, without an `Offload` around it. No other decodes it.
    """

    arrays: tuple[Any, ...]  # JAX may replace the arrays by shapes or specs
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    dtype: jnp.dtype = dataclasses.field(metadata={"static": True})
    codec: "Codec" = dataclasses.field(metadata={"static": True})

    @property
    def nbytes(self) -> int:
        """Size of the stored arrays in bytes; sub-byte dtypes are packed."""
        return sum(array_nbytes(a.shape, a.dtype) for a in jax.tree.leaves(self.arrays))


class Codec(abc.ABC):
    """Encodes one floating-point array in fewer bytes.

    A codec is a frozen, hashable dataclass of static options. Axis 0 of an array is the batch. A
    codec never mixes samples, so a batch that is sharded over devices needs no communication, but
    for the few elements that seed the noise of `SignAware`. NaN and Inf decode to non-finite
    values, and finite values to finite ones unless a codec says otherwise.

    Subclasses define `_encode` and `_decode`.

    Attributes:
        name: Name of the codec in spec strings and in the names of saved residuals.
        kinds: Kinds of operation of `jaxcomp.nn` whose residuals the codec can store; `nn.Coded`
            lists them.
        unbiased: Whether the mean of `decode(encode(x, seed))` over all seeds is `x`.
        is_exact: Whether decoding returns the array itself. Then second derivatives are defined.
        on_host: Whether the encoded array is moved to host memory.
        fuses_decode_on_tpu: Whether XLA for TPUs fuses decoding into each kernel that reads the
            array, so that the decoded array is never written to memory. On a TPU no barrier is then
            placed before decoding. False for `Offload` of any codec, because its copies from the
            host need the barrier.
        kernels: Whether programs for one NVIDIA GPU use Pallas kernels in place of XLA's, as far as
            there are any.
    """

    name: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]] = (
        "conv",
        "dot",
        "batch_norm",
        "layer_norm",
        "gelu",
        "silu",
        "affine",
    )
    unbiased: bool
    is_exact: ClassVar[bool] = False
    on_host: ClassVar[bool] = False
    fuses_decode_on_tpu: bool = False
    kernels: bool = False

    @classmethod
    def stored_name(cls) -> str:
        """Returns `jaxcomp/<codec>`: the name scope of its operations and of saved residuals."""
        return f"jaxcomp/{cls.name}"

    def encode(
        self,
        x: Shaped[Array, "..."],
        seed: Seed = None,
        importance: Float[Array, " batch"] | None = None,
    ) -> Encoded:
        """Encodes an array.

        Args:
            x: float32, bfloat16 or float16 array of any shape; axis 0 is the batch.
            seed: Integer scalar that selects the rounding noise, of any size if it is one of
                Python. Codecs without noise ignore it.
            importance: Weight of each sample, shape (batch,). Only codecs that give samples
                different numbers of bits read it.

        Returns:
            The stored arrays with the shape and dtype of `x`.

        Raises:
            TypeError: If `x` is no array, or the codec cannot store its dtype.
            ValueError: If the codec cannot store the shape of `x`.
            NotImplementedError: If it is differentiated, unless the codec is exact.
        """
        self._check_array(x)
        x = x if self.is_exact else undifferentiable(x)
        with jax.named_scope(self.stored_name()):
            encode = self._encode_explicit if explicit_axes() else self._encode_once
            return Encoded(encode(x, as_seed(seed)), x.shape, x.dtype, self)

    def decode(self, encoded: Encoded) -> Shaped[Array, "..."]:
        """Returns the array that `encoded` stands for, in the shape and dtype of the original.

        Args:
            encoded: What `encode` of an equal codec returned.

        Raises:
            TypeError: If `encoded` is no code.
            ValueError: If another codec encoded it.
        """
        self._check_code(encoded)
        with jax.named_scope(self.stored_name()):
            decode = self._decode_explicit if explicit_axes() else self._decode_once
            return decode(encoded.arrays, encoded.shape, encoded.dtype)

    def nbytes(self, shape: tuple[int, ...], dtype: DTypeLike) -> int:
        """Returns the exact size of an encoded array in bytes, with metadata and padding.

        Args:
            shape: Shape of the array to encode.
            dtype: Dtype of the array to encode.

        Returns:
            Size in bytes.

        Raises:
            TypeError: If the codec cannot store `dtype`.
            ValueError: If the codec cannot store `shape`.
        """
        self.check(shape, dtype)
        x = jax.ShapeDtypeStruct(shape, dtype)
        return jax.eval_shape(self.encode, x).nbytes

    def check(self, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        """Checks that the codec can store an array of this shape and dtype.

        Args:
            shape: Shape of the array.
            dtype: Dtype of the array.

        Raises:
            TypeError: If the codec cannot store `dtype`.
            ValueError: If the codec cannot store `shape`.
        """
        name = jnp.dtype(dtype).name
        if name not in FLOATS:
            raise TypeError(f"{type(self).__name__} stores {FLOATS}; got x of dtype {name}")

    def _check_array(self, x: Any) -> None:
        if not (hasattr(x, "shape") and hasattr(x, "dtype")):
            raise TypeError(f"x={reprlib.repr(x)}: expected an array")
        self.check(x.shape, x.dtype)

    def _check_code(self, encoded: Any) -> None:
        if not isinstance(encoded, Encoded):
            given = reprlib.repr(encoded)
            raise TypeError(f"encoded={given}: expected what {self}.encode returns")
        if encoded.codec != self:
            raise ValueError(f"encoded: expected a code of {self}, got one of {encoded.codec}")

    def _encode_explicit(self, x: Array, seed: Seed) -> tuple[Array, ...]:
        """Returns the arrays to store, sharded as `x`."""
        given: tuple[Any, ...] = (x, None if seed is None else jnp.asarray(seed))
        stored: tuple[Array, ...] = over_automatic_axes(self._encode_once, given, x)
        return stored

    def _decode_explicit(
        self, arrays: tuple[Any, ...], shape: tuple[int, ...], dtype: DTypeLike
    ) -> Array:
        """Returns the array, sharded as that of the stored ones that has the most axes."""

        def decode(arrays: tuple[Any, ...]) -> Array:
            return self._decode_once(arrays, shape, dtype)

        most = max(jax.tree.leaves(arrays), key=lambda a: a.ndim)
        decoded: Array = over_automatic_axes(decode, (arrays,), most)
        return decoded

    # JAX traces these once for all arrays of a shape, and inlines the result.

    @functools.partial(jax.jit, static_argnums=0, inline=True)
    def _encode_once(self, x: Array, seed: Seed) -> tuple[Array, ...]:
        return self._encode(x, seed)

    @functools.partial(jax.jit, static_argnums=(0, 2, 3), inline=True)
    def _decode_once(
        self, arrays: tuple[Any, ...], shape: tuple[int, ...], dtype: DTypeLike
    ) -> Array:
        return self._decode(arrays, shape, dtype)

    @abc.abstractmethod
    def _encode(self, x: Array, seed: Seed) -> tuple[Array, ...]: ...

    @abc.abstractmethod
    def _decode(
        self, arrays: tuple[Any, ...], shape: tuple[int, ...], dtype: DTypeLike
    ) -> Array: ...


@dataclasses.dataclass(frozen=True)
class Exact(Codec):
    """Stores the array unchanged.

    Example:
        >>> Exact().nbytes((2, 3), jnp.float32)
        24
    """

    name: ClassVar[str] = "exact"
    kinds = (*Codec.kinds, "relu", "dropout", "max_pool", "norm_act")
    unbiased = True
    is_exact = True

    def _encode(self, x: Array, seed: Seed) -> tuple[Array, ...]:
        return (x,)

    def _decode(self, arrays: tuple[Array, ...], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        return arrays[0]


@dataclasses.dataclass(frozen=True)
class Cast(Codec):
    """Stores the array in a narrower floating-point dtype, rounded to nearest. Biased.

    The error is at most half a unit in the last place of `dtype`. Values beyond the range of
    `dtype` become Inf, or NaN if the dtype has no Inf.

    Attributes:
        dtype: Name of the stored dtype, such as "bfloat16", "float16" or "float8_e4m3fn".

    Raises:
        TypeError: If `dtype` is not a floating-point dtype of at most 32 bits. On encoding: if it
            is wider than the dtype of the array.

    Example:
        >>> Cast("bfloat16").nbytes((2, 3), jnp.float32)
        12
    """

    dtype: str = "bfloat16"
    name: ClassVar[str] = "cast"
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
        """Checks that the array is floating-point and no narrower than the stored dtype.

        Args:
            shape: Shape of the array.
            dtype: Dtype of the array.

        Raises:
            TypeError: If the array is not floating-point, or narrower than the stored dtype.
        """
        super().check(shape, dtype)
        if jax.dtypes.itemsize_bits(self.dtype) > jax.dtypes.itemsize_bits(dtype):
            raise TypeError(f"{self}: wider than x of dtype {jnp.dtype(dtype).name}")

    def _encode(self, x: Array, seed: Seed) -> tuple[Array, ...]:
        return (x.astype(self.dtype),)

    def _decode(self, arrays: tuple[Array, ...], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        return arrays[0].astype(dtype)
