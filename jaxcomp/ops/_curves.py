"""Activation functions of smooth pieces, and functions of a noisy argument without bias."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

_QUICK = 1.702  # factor of the argument of `sigmoid` in QuickGELU
_WIDEST = 2.0  # distance of levels up to which the correction grows

Derivatives = tuple[Array, ...]


@dataclasses.dataclass(frozen=True)
class Curve:
    """An activation function of smooth pieces.

    Attributes:
        function: The function of `jax.nn`.
        derivatives: The function and its derivatives up to the third, from the argument and the
            piece in which it lies. The second and third, which correct for noise, may be
            approximate.
        piece: The piece in which each argument lies; None if there is one.
        zero_below: The argument below which function and derivative are less than 0.0005 from 0.
        is_identity_above: The argument above which they are as close to the argument and to 1.
        piece_bits: Bits of the number of a piece.
    """

    function: Callable[[Array], Array]
    derivatives: Callable[[Array, Array], Derivatives]
    piece: Callable[[Array], Array] | None = None
    zero_below: float = -math.inf
    is_identity_above: float = math.inf
    piece_bits: int = 2


class Slopes(NamedTuple):
    """What a norm and an activation function after it need in the backward pass.

    Attributes:
        normalized: The normalised value.
        slope: The derivative of the activation function.
        product: The product of both.
    """

    normalized: Array
    slope: Array
    product: Array


def result(curve: Curve, h: Array, step: Array, gain: Array, offset: Array, piece: Array) -> Array:
    """Returns `curve` of `gain * h + offset`, without bias where `h` is dithered.

    The error of `h` has to be uniform, `step` wide and independent of `h`. The mean of a function
    over such errors exceeds the function by `step^2 / 24` times its second derivative, which is
    subtracted. What is left of the mean is 0 for the pieces of `hard_swish` and `relu6`, and below
    0.001 for `silu` and its derivative where levels of its argument are at most 1 apart. The next
    term of the series would make XLA for GPUs write decoded values to memory.

    Args:
        curve: The activation function.
        h: Normalised values with an error.
        step: Distance between levels of `h`.
        gain: Factor of each feature.
        offset: Offset of each feature.
        piece: The piece in which the exact value lies.
    """
    f = curve.derivatives(gain * h + offset, piece)
    return f[0] - excess(step * gain) * f[2]


def slopes(curve: Curve, h: Array, step: Array, gain: Array, offset: Array, piece: Array) -> Slopes:
    """Returns what the backward pass needs, each without bias. Arguments are those of `result`."""
    f = curve.derivatives(gain * h + offset, piece)
    factor = excess(step * gain)
    slope = f[1] - factor * f[3]
    # The second derivative of h f'(gain h + offset) by h has one term more than that of f'.
    product = h * slope - factor * 2 / jnp.where(gain == 0, 1, gain) * f[2]
    return Slopes(h, slope, product)


def excess(step: Array) -> Array:
    """Returns the factor of the second derivative; bounded, as a large one would be all noise."""
    return jnp.minimum(step * step, _WIDEST**2) / 24


def _silu(z: Array, piece: Array) -> Derivatives:
    s = jax.nn.sigmoid(z)
    p, q = s * (1 - s), 1 - 2 * s
    return z * s, s + z * p, p * (z * q + 2), p * (z * (1 - 6 * p) + 3 * q)


def quick_gelu(z: Array) -> Array:
    """Returns the approximation of GELU by `sigmoid`, as CLIP has it (arXiv:1606.08415)."""
    return z * jax.nn.sigmoid(_QUICK * z)


def _quick_gelu(z: Array, piece: Array) -> Derivatives:
    f = _silu(_QUICK * z, piece)
    return f[0] / _QUICK, f[1], _QUICK * f[2], _QUICK**2 * f[3]


def _gelu(z: Array, piece: Array) -> Derivatives:
    """Returns those of the approximation by `tanh`, as of `z` times a distribution function."""
    twice, cubic = 2 * (2 / math.pi) ** 0.5, 0.044715
    c = _where_curved(z)
    square = c * c
    below = jax.nn.sigmoid(c * (twice + twice * cubic * square))
    density = below * (1 - below) * (twice + 3 * twice * cubic * square)
    return _of_normal(z, c, below, density)


def _gelu_by_erf(z: Array, piece: Array) -> Derivatives:
    c = _where_curved(z)
    below = (1 + jax.lax.erf(c * 0.5**0.5)) / 2
    density = jnp.exp(-c * c / 2) * (2 * math.pi) ** -0.5
    return _of_normal(z, c, below, density)


def _of_normal(z: Array, c: Array, below: Array, density: Array) -> Derivatives:
    """Returns those of `z` times the normal distribution function.

    Args:
        z: The argument.
        c: The same, clipped.
        below: The distribution function, or an approximation.
        density: Its derivative.
    """
    square = c * c
    return z * below, below + c * density, density * (2 - square), density * c * (square - 4)


def _where_curved(z: Array) -> Array:
    """Clips to where a GELU is not linear in float32: powers of `z` might be infinite."""
    return jnp.clip(z, -20, 20)


def gelu_by_erf(z: Array) -> Array:
    """Returns `jax.nn.gelu` without its approximation."""
    return jax.nn.gelu(z, approximate=False)


def _hard_swish(z: Array, piece: Array) -> Derivatives:
    inside, above = piece == 1, (piece == 2).astype(z.dtype)
    zero = jnp.zeros_like(z)
    return (
        jnp.where(inside, z * (z + 3) / 6, above * z),
        jnp.where(inside, (2 * z + 3) / 6, above),
        jnp.where(inside, 1 / 3, zero),
        zero,
    )


def _relu6(z: Array, piece: Array) -> Derivatives:
    inside = (piece == 1).astype(z.dtype)
    zero = jnp.zeros_like(z)
    return inside * z + jnp.where(piece == 2, 6.0, 0.0), inside, zero, zero


def _linear_pieces(slope: float, z: Array, piece: Array) -> Derivatives:
    """Returns those of a function that is linear on both sides of 0, with the slope 1 above."""
    zero = jnp.zeros_like(z)
    slopes = jnp.where(piece == 1, 1.0, slope)
    return slopes * z, slopes, zero, zero


def _elu(z: Array, piece: Array) -> Derivatives:
    is_linear = piece == 1
    e = jnp.where(is_linear, 0.0, jnp.exp(jnp.minimum(z, 20.0)))
    return jnp.where(is_linear, z, e - 1), jnp.where(is_linear, 1.0, e), e, e


def _is_above_0(z: Array) -> Array:
    """Returns 1 above 0, as `jax.nn.relu` and `jax.nn.elu` are differentiated."""
    return (z > 0).astype(jnp.int32)


@functools.lru_cache
def leaky_relu(slope: float) -> Curve:
    """Returns `jax.nn.leaky_relu` of a slope; at 0 its derivative is 1."""
    return Curve(
        functools.partial(jax.nn.leaky_relu, negative_slope=slope),
        functools.partial(_linear_pieces, slope),
        lambda z: (z >= 0).astype(jnp.int32),
        piece_bits=1,
    )


def _identity(z: Array, piece: Array) -> Derivatives:
    zero = jnp.zeros_like(z)
    return z, jnp.ones_like(z), zero, zero


IDENTITY = Curve(lambda z: z, _identity)
RELU = Curve(jax.nn.relu, functools.partial(_linear_pieces, 0.0), _is_above_0, piece_bits=1)


def _within_6(t: Array) -> Array:
    """Returns 0 up to 0, 1 between, 2 from 6 on, as `jax.nn.relu6` is differentiated."""
    return (t > 0).astype(jnp.int32) + (t >= 6)


CURVES = (
    Curve(jax.nn.silu, _silu, zero_below=-10.0),
    Curve(jax.nn.gelu, _gelu, zero_below=-4.0, is_identity_above=4.0),
    Curve(gelu_by_erf, _gelu_by_erf, zero_below=-4.0, is_identity_above=4.0),
    Curve(quick_gelu, _quick_gelu, zero_below=-6.0),
    Curve(jax.nn.hard_swish, _hard_swish, lambda z: _within_6(z + 3)),
    Curve(jax.nn.relu6, _relu6, _within_6),
    Curve(jax.nn.elu, _elu, _is_above_0, piece_bits=1),
)
