"""Codes that wait in the host's memory."""

import dataclasses
import typing

from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxcomp.codecs._codec import Codec, Encoded, Seed


@dataclasses.dataclass(frozen=True)
class Offload(Codec):
    """Stores what another codec makes of an array in the host's pinned memory.

    Operations move a code there once it is computed, and back when its gradient arrives.
    ActNN's level L4 (Chen et al., ICML 2021, arXiv:2104.14129, section 5).

    Attributes:
        codec: Makes the code.
        in_turn: Whether a block's own norm waits in the backward pass until its shortcut's is
            through (`ops.in_turn`), so that the cotangents of both are never in memory at once. For
            a shortcut's norm (`residual_norm` of `nn.NormAct`); nothing else reads it. With codes
            on the host a network's peak may be there.

    Raises:
        TypeError: If `codec` is no codec, or is one that is offloaded already.
        ValueError: If `in_turn` is no bool.

    Example:
        >>> from jaxcomp import Quantize
        >>> Offload(Quantize(bits=4)).nbytes((2, 8, 8, 4), "float32")  # of the host's memory
        320
    """

    codec: Codec
    in_turn: bool = False
    name: typing.ClassVar[str] = "offload"
    on_host = True

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec) or isinstance(self.codec, Offload):
            raise TypeError(f"codec={self.codec!r}: expected a codec such as Quantize(bits=4)")
        if type(self.in_turn) is not bool:
            raise ValueError(f"in_turn={self.in_turn!r}: expected True or False")

    @property
    def kinds(self) -> tuple[str, ...]:  # type: ignore[override]
        """The kinds of operation that may store by `codec`."""
        return self.codec.kinds

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        """Whether `codec` is."""
        return self.codec.unbiased

    def check(self, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        """Raises an error if `codec` cannot store an array of this shape and dtype."""
        self.codec.check(shape, dtype)

    def encode(
        self, x: Array, seed: Seed = None, importance: Float[Array, " batch"] | None = None
    ) -> Encoded:
        """Encodes an array; it is not moved yet."""
        return self.codec.encode(x, seed, importance)

    def _encode(self, x: Array, seed: Seed) -> tuple[Array, ...]:
        return self.codec._encode(x, seed)

    def _decode(
        self, arrays: tuple[typing.Any, ...], shape: tuple[int, ...], dtype: DTypeLike
    ) -> Array:
        return self.codec._decode(arrays, shape, dtype)


def inner_codec(codec: Codec) -> Codec:
    """What makes a codec's codes, wherever they wait.

    Example:
        >>> from jaxcomp import Quantize
        >>> inner_codec(Offload(Quantize(bits=4))) == inner_codec(Quantize(bits=4))
        True
    """
    return codec.codec if isinstance(codec, Offload) else codec


def placed_like(other: Codec, codec: Codec) -> Codec:
    """A codec whose codes wait where those of another do.

    Example:
        >>> from jaxcomp import Quantize
        >>> placed_like(Offload(Quantize(bits=4)), Quantize(bits=2))
        Offload(codec=Quantize(bits=2, group='channel', rounding='stochastic'), in_turn=False)
    """
    return dataclasses.replace(other, codec=codec) if isinstance(other, Offload) else codec
