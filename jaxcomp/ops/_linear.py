"""Matrix products whose left operand waits for the backward pass compressed."""

import functools
import typing
from collections.abc import Callable, Sequence

import jax
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxcomp._core import barriers
from jaxcomp._core.shard_map import match_varying, type_like
from jaxcomp.codecs import BlockSparse, Codec, Encoded, Offload
from jaxcomp.codecs._codec import Seed
from jaxcomp.codecs._offload import inner_codec
from jaxcomp.ops import _block_product as block_product
from jaxcomp.ops._row_major import row_major
from jaxcomp.ops._sensitivity import Sink, check_sink, importance, sensitivity

DotDimensionNumbers = tuple[
    tuple[Sequence[int], Sequence[int]],
    tuple[Sequence[int], Sequence[int]],
]
WeightGradient = Callable[[Encoded, Array], Array]


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
    sink: Sink | None = None,
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
        sink: Takes the samples' sensitivity as its gradient; see `ops.Sink`. Not without a codec.

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
    layer = [[*map(list, axes)] for axes in dimension_numbers] == [[[lhs.ndim - 1], [0]], [[], []]]
    gradient = None
    if isinstance(inner_codec(codec), BlockSparse) and layer and rhs.ndim == 2:
        gradient = layer_gradient(codec, lhs, rhs.shape[1], rhs.dtype, precision)
    return bilinear(stock, codec, lhs, rhs, seed, sink=sink, weight_gradient=gradient)


def layer_gradient(
    codec: Codec,
    x: Float[Array, "batch ... features"],
    columns: int,
    dtype: DTypeLike,
    precision: lax.PrecisionLike,
) -> WeightGradient:
    """How a linear layer's weight gradient is made of its coded input and the cotangent.

    Args:
        codec: How the input is stored.
        x: The input, for its shape and dtype.
        columns: Columns of the weight.
        dtype: Of the weight's gradient.
        precision: Of the product.
    """
    codec = inner_codec(codec)
    if isinstance(codec, BlockSparse):
        return block_product.gradient(codec, x, columns, dtype, precision)
    return functools.partial(block_product.by_dense, codec, precision=precision, dtype=dtype)


class Reads(typing.NamedTuple):
    """What a product reads of its left operand.

    Attributes:
        part: Takes it from the operand, and from each array of a code that travels: these have the
            operand's axes, but for the last one of packed codes, or size 1 along them.
        product: Of that part and the right operand, equal to the whole product.
    """

    part: Callable[[Array], Array]
    product: Callable[[Array, Array], Array]


def bilinear(
    stock: Callable[[Array, Array], Array],
    codec: Codec,
    lhs: Array,
    rhs: Array,
    seed: Seed,
    *,
    code: Encoded | None = None,
    sink: Sink | None = None,
    uses: float = 1.0,
    reads: Reads | None = None,
    weight_gradient: WeightGradient | None = None,
) -> Array:
    """Calls `stock(lhs, rhs)`, linear in each argument, and keeps `lhs` as `codec` stores it.

    With `code`, what a producer pinned, nothing is encoded: the same code waits here, too. `uses`
    is for the statistic that `sink` takes. Of `lhs`, only what `reads` says is stored or decoded.
    `weight_gradient` makes the gradient of `rhs` of the code and the cotangent, without the decoded
    `lhs`.
    """
    part, product = Reads(lambda lhs: lhs, stock) if reads is None else reads
    stored = jax.eval_shape(part, lhs)
    codec.check(stored.shape, stored.dtype)
    check_sink(sink, lhs.shape)
    travels = code is not None

    @jax.custom_vjp
    def op(lhs: Array, rhs: Array, code: Encoded | None, sink: Sink | None, seed: Seed) -> Array:
        return stock(lhs, rhs)

    def forward(*given: typing.Any) -> typing.Any:
        values = jax.tree.map(lambda leaf: leaf.value, given, is_leaf=is_argument)
        lhs, rhs, code, sink, seed = values
        if not (is_perturbed(given[1]) or is_perturbed(given[3])):
            # As of a frozen kernel: nothing in the backward pass reads `lhs`.
            return stock(lhs, rhs), (None, rhs)
        if code is None:
            coded = codec.encode(part(lhs), seed, importance(sink))
            (lhs, rhs), code = barriers.save_residual((lhs, rhs), coded, codec)
        elif isinstance(codec, Offload):
            rhs = barriers.await_host_copy(rhs, code)
        return stock(lhs, rhs), (code, values[1])

    def backward(residual: typing.Any, cotangent: Array) -> typing.Any:
        code, rhs = residual
        drhs = dsink = None
        if code is not None:
            code, cotangent = barriers.barrier_together(code, cotangent, codec)
            if travels:
                code = Encoded(jax.tree.map(part, code.arrays), stored.shape, stored.dtype)
            if sink is not None:
                dsink = sensitivity(codec.decode(code), cotangent, uses)
            if weight_gradient is not None:
                drhs = weight_gradient(code, cotangent)
            else:
                decoded = codec.decode(code)
                transpose = jax.linear_transpose(lambda rhs: product(decoded, rhs), like_rhs)
                (drhs,) = transpose(cotangent)
            drhs, cotangent = barriers.barrier_together(row_major(drhs), cotangent, codec)
        (dlhs,) = jax.linear_transpose(lambda lhs: stock(lhs, rhs), like_lhs)(cotangent)
        return dlhs, drhs, None, dsink, None

    lhs, rhs, code, sink, seed = match_varying((lhs, rhs, code, sink, seed))
    like_lhs, like_rhs = type_like(lhs), type_like(rhs)
    op.defvjp(forward, backward, symbolic_zeros=True)
    return op(lhs, rhs, code, sink, seed)


def is_argument(leaf: typing.Any) -> bool:
    """Whether a leaf is what JAX gives a custom forward rule with `symbolic_zeros`."""
    return isinstance(leaf, CustomVJPPrimal)


def is_perturbed(argument: typing.Any) -> bool:
    """Whether a gradient is asked for with respect to an argument of a custom forward rule."""
    leaves = jax.tree.leaves(argument, is_leaf=is_argument)
    return any(leaf.perturbed for leaf in leaves)
