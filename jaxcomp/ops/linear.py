"""Matrix products whose left operand waits for the backward pass compressed."""

import functools
import typing
from collections.abc import Callable, Sequence

import jax
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxcomp import residuals
from jaxcomp.codecs import Codec, Encoded
from jaxcomp.codecs.codec import Seed

DotDimensionNumbers = tuple[
    tuple[Sequence[int], Sequence[int]],
    tuple[Sequence[int], Sequence[int]],
]


def dot_general(
    lhs: Float[Array, "..."],
    rhs: Float[Array, "..."],
    dimension_numbers: DotDimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    out_sharding: typing.Any = None,
    codec: Codec | None = None,
    seed: Seed = None,
) -> Float[Array, "..."]:
    """`jax.lax.dot_general` that keeps `lhs` for the backward pass as `codec` stores it.

    The result is bit-identical to `lax.dot_general`; the gradient of `lhs` is exact, that of `rhs`
    is the exact one at the decoded `lhs`. Accepted by Flax layers as `dot_general=`.

    Args:
        lhs: Activations; axis 0 is the batch.
        rhs: Weights; kept exactly, as the caller holds them anyway.
        dimension_numbers: As `lax.dot_general`.
        precision: As `lax.dot_general`.
        preferred_element_type: As `lax.dot_general`.
        out_sharding: As `lax.dot_general`.
        codec: How `lhs` is stored; None leaves everything to `lax.dot_general`.
        seed: Redraws the rounding noise of the codec.

    Returns:
        The product.

    Raises:
        TypeError: If `lhs` is not a floating-point array.
        ValueError: If the codec cannot store the shape of `lhs`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxcomp import Quantize
        >>> x, w = jnp.ones((4, 8)), jnp.ones((8, 2))
        >>> f = lambda w: dot_general(x, w, (((1,), (0,)), ((), ())), codec=Quantize(2)).sum()
        >>> jax.grad(f)(w)[0].tolist()
        [4.0, 4.0]
    """
    stock = functools.partial(
        lax.dot_general,
        dimension_numbers=dimension_numbers,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )
    if codec is None:
        return stock(lhs, rhs)
    return bilinear(stock, codec, lhs, rhs, seed)


def bilinear(
    stock: Callable[[Array, Array], Array],
    codec: Codec,
    lhs: Array,
    rhs: Array,
    seed: Seed,
    code: Encoded | None = None,
) -> Array:
    """Calls `stock(lhs, rhs)`, linear in each argument, and keeps `lhs` as `codec` stores it.

    With `code`, what a producer pinned, nothing is encoded: the same code waits here, too.
    """
    codec.check(lhs.shape, lhs.dtype)

    @jax.custom_vjp
    def op(lhs: Array, rhs: Array, code: Encoded | None, seed: Seed) -> Array:
        return stock(lhs, rhs)

    def forward(lhs: Array, rhs: Array, code: Encoded | None, seed: Seed) -> typing.Any:
        if code is None:
            lhs, code = residuals.keep(lhs, codec.encode(lhs, seed), codec)
        return stock(lhs, rhs), (code, rhs)

    def backward(residual: typing.Any, cotangent: Array) -> tuple[Array, Array, None, None]:
        code, rhs = residual
        code, cotangent = residuals.tie(code, cotangent)
        lhs = codec.decode(code)
        (drhs,) = jax.vjp(lambda rhs: stock(lhs, rhs), rhs)[1](cotangent)
        drhs, cotangent = residuals.tie(drhs, cotangent)
        (dlhs,) = jax.vjp(lambda lhs: stock(lhs, rhs), lhs)[1](cotangent)
        return dlhs, drhs, None, None

    op.defvjp(forward, backward)
    return op(lhs, rhs, code, seed)
