"""A concatenation of arrays that have codes, such as the skip connection of a U-Net."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxcomp._core.layouts import as_convolved
from jaxcomp.codecs import Codec, noise
from jaxcomp.codecs._codec import Seed
from jaxcomp.ops._coded_array import CodedArray, encode_operand


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Concatenated:
    """Arrays with codes, and their concatenation along the channels, the last axis.

    Attributes:
        value: The concatenation.
        parts: The arrays.
    """

    value: Float[Array, "batch ... channels"]
    parts: tuple[CodedArray, ...]


def concatenate(parts: Sequence[Array | CodedArray], codec: Codec, seed: Seed) -> Concatenated:
    """Concatenates arrays along their channels, the last axis; the code of each is kept.

    Args:
        parts: Arrays of equal shapes but for the channels, with codes or without.
        codec: Codec of those without.
        seed: Integer scalar that selects their rounding noise.

    Returns:
        The concatenation, and the arrays, each with a code.
    """
    seeds = noise.counted(seed, len(parts), 1)
    coded = tuple(
        part if isinstance(part, CodedArray) else encode_operand(as_convolved(part), codec, of_part)
        for part, of_part in zip(parts, seeds, strict=True)
    )
    value = jnp.concatenate([part.value for part in coded], axis=-1)
    return Concatenated(as_convolved(value), coded)


def sum_of_parts(
    stock: Callable[[Array, Array], Array],
    coded: Callable[[CodedArray, Array], Array],
    x: Concatenated,
    kernel: Array,
    axis: int,
) -> Array:
    """Computes a product of a concatenation and a kernel, whose backward pass is that of each part.

    Then no array of the size of the concatenation, or of its gradient, is made in it.

    Args:
        stock: The product.
        coded: The product of an array that has a code.
        x: The concatenation.
        kernel: The kernel.
        axis: The axis of the kernel that belongs to the channels.

    Returns:
        The result of `stock`.
    """
    result = stock(*jax.lax.stop_gradient((x.value, kernel)))
    sizes = [part.value.shape[-1] for part in x.parts]
    kernels = jax.lax.split(kernel, sizes, axis)
    total = sum(map(coded, x.parts, kernels), jnp.zeros_like(result))
    return _with_derivative_of(result, total)


@jax.custom_jvp
def _with_derivative_of(result: Array, other: Array) -> Array:
    """Returns the first of two equal arrays, with the derivative of the second."""
    return result


@_with_derivative_of.defjvp
def _(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return primals[0], tangents[1]
