"""Codes of normalised values whose rounding error does not depend on the values."""

import typing

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxcomp.codecs import noise, packing
from jaxcomp.codecs._codec import Seed
from jaxcomp.codecs._sign_aware import SignAware, extremes


class Dithered(typing.NamedTuple):
    """The arrays of a code.

    Attributes:
        packed: Packed codes.
        ends: Extremes of each channel of each sample in bfloat16; empty with `scale_source="norm"`.
        words: What the noise is hashed from, for each axis.
    """

    packed: tuple[Array, ...]
    ends: tuple[Array, ...]
    words: tuple[Array, ...]


def encode(h: Float[Array, "*shape"], codec: SignAware, seed: Seed) -> Dithered:
    """Encodes normalised values on equidistant levels.

    Noise is added before the value is rounded, and the same noise is subtracted from the level:
    "subtractive dither". The error is then uniform between half a step below and above, whatever
    the value is, so functions of the decoded value can be corrected (`ops._curves`). Its variance
    is half of that of stochastic rounding on average.

    Args:
        h: float32 values with mean 0 and variance 1 in each channel.
        codec: Bits, and source of the levels' ends, as `SignAware.encode_normalized` has them.
        seed: Integer scalar that selects the noise, which does not depend on the values.

    Returns:
        The encoded values.
    """
    ends = () if codec.scale_source == "norm" else extremes(h)
    low, step = codec.equidistant(ends)
    words = noise.axis_words(h.shape, seed)
    level = jnp.clip((h - low) / jnp.where(step == 0, 1, step), 0, 2**codec.bits - 1)
    codes = jnp.floor(level + noise.of_axes(words)).astype(jnp.int32)
    return Dithered(packing.pack(codes, codec.bits), ends, words)


def decode(
    code: Dithered, codec: SignAware, shape: tuple[int, ...]
) -> tuple[Float[Array, "*shape"], Array]:
    """Returns the float32 values that `encode` encoded, and the distance between levels."""
    low, step = codec.equidistant(code.ends)
    codes = packing.unpack(code.packed, shape, codec.bits).astype(jnp.float32)
    return (codes + (0.5 - noise.of_axes(code.words))) * step + low, step
