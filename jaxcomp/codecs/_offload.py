"""Encoded residuals in host memory."""

import dataclasses
from typing import Any, ClassVar

from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxcomp.codecs._codec import Codec, Encoded, Seed


@dataclasses.dataclass(frozen=True)
class Offload(Codec):
    """Encodes an array by another codec and stores the result in the host's pinned memory.

    Operations move the encoded residual to the host once it is computed. They copy it back when the
    cotangent arrives in the backward pass.

    Source: level L4 of ActNN (Chen et al., ICML 2021, arXiv:2104.14129, section 5).

    Attributes:
        codec: Codec that encodes the array.

    Raises:
        TypeError: If `codec` is not a codec, or is an `Offload` itself.

    Example:
        >>> from jaxcomp import Quantize
        >>> Offload(Quantize(bits=4)).nbytes((2, 8, 8, 4), "float32")  # bytes of host memory
        320
    """

    codec: Codec
    name: ClassVar[str] = "offload"
    on_host = True

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec) or isinstance(self.codec, Offload):
            raise TypeError(f"codec={self.codec!r}: expected a codec such as Quantize(bits=4)")

    @property
    def kinds(self) -> tuple[str, ...]:  # type: ignore[override]
        """The kinds of operation whose residuals `codec` can store."""
        return self.codec.kinds

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        """Whether `codec` is unbiased."""
        return self.codec.unbiased

    def check(self, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        """Checks that `codec` can store an array of this shape and dtype.

        Args:
            shape: Shape of the array.
            dtype: Dtype of the array.

        Raises:
            TypeError: If `codec` cannot store `dtype`.
            ValueError: If `codec` cannot store `shape`.
        """
        self.codec.check(shape, dtype)

    def encode(
        self, x: Array, seed: Seed = None, importance: Float[Array, " batch"] | None = None
    ) -> Encoded:
        """Encodes an array by `codec`; the result is still on the device."""
        return self.codec.encode(x, seed, importance)

    def _check_code(self, encoded: Any) -> None:
        self.codec._check_code(encoded)

    def _encode(self, x: Array, seed: Seed) -> tuple[Array, ...]:
        return self.codec._encode(x, seed)

    def _decode(self, arrays: tuple[Any, ...], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        return self.codec._decode(arrays, shape, dtype)


def inner_codec(codec: Codec) -> Codec:
    """Returns the codec that encodes: the codec inside an `Offload`, or the codec itself.

    Example:
        >>> from jaxcomp import Quantize
        >>> inner_codec(Offload(Quantize(bits=4))) == inner_codec(Quantize(bits=4))
        True
    """
    return codec.codec if isinstance(codec, Offload) else codec


def placed_like(other: Codec, codec: Codec) -> Codec:
    """Returns `codec` inside an `Offload` if `other` is one; otherwise `codec` itself.

    Args:
        other: Codec that determines the memory: host or device.
        codec: Codec that encodes.

    Returns:
        A codec that encodes as `codec` and stores where `other` does.

    Example:
        >>> from jaxcomp import Quantize
        >>> placed_like(Offload(Quantize(bits=4)), Quantize(bits=2))
        Offload(codec=Quantize(bits=2, group='channel', rounding='stochastic'))
    """
    return Offload(codec) if isinstance(other, Offload) else codec
