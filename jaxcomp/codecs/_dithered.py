"""Codes of values whose rounding error does not depend on the values."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxcomp.codecs import noise, packing
from jaxcomp.codecs._codec import Seed
from jaxcomp.codecs._ranges import equidistant, extremes, reciprocal


class Dithered(NamedTuple):
    """The arrays of a code.

    Attributes:
        packed: Packed codes.
        ends: Extremes of each group in bfloat16.
        words: What the noise is hashed from, for each axis.
    """

    packed: tuple[Array, ...]
    ends: tuple[Array, ...]
    words: tuple[Array, ...]


def encode(
    h: Float[Array, "*shape"], bits: int, seed: Seed, ends: tuple[Array, Array] | None = None
) -> Dithered:
    """Encodes values on equidistant levels between their extremes.

    Noise is added before the value is rounded, and the same noise is subtracted from the level:
    "subtractive dither". The error is then uniform between half a step below and above, whatever
    the value is, so functions of the decoded value can be corrected (`ops._curves`). Its variance
    is half of that of stochastic rounding on average.

    Args:
        h: float32 values.
        bits: Bits of an element.
        seed: Integer scalar that selects the noise, which does not depend on the values.
        ends: Extremes of each group, from `extremes`; None for each channel of each sample.

    Returns:
        The encoded values.
    """
    ends = extremes(h) if ends is None else ends
    low, step = equidistant(ends, bits)
    words = noise.axis_words(h.shape, seed)
    level = jnp.clip((h - low) * reciprocal(step), 0, 2**bits - 1)
    codes = noise.rounded(level, noise.of_axes(words), bits)
    return Dithered(packing.pack(codes, bits), ends, words)


def decode(
    code: Dithered, bits: int, shape: tuple[int, ...]
) -> tuple[Float[Array, "*shape"], Array]:
    """Returns the float32 values that `encode` encoded, and the distance between levels."""
    low, step = equidistant(code.ends, bits)
    codes = packing.unpack(code.packed, shape, bits).astype(jnp.float32)
    return (codes + (0.5 - noise.fraction(noise.of_axes(code.words)))) * step + low, step
