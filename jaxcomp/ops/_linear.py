"""Matrix products with a compressed saved left operand."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxcomp._core import barriers
from jaxcomp._core.custom_derivative import Differentiable
from jaxcomp._core.explicit import over_automatic_axes
from jaxcomp._core.linear_map import ByPosition
from jaxcomp._core.row_kernels import by_row_kernel
from jaxcomp._core.shard_map import match_varying, type_like
from jaxcomp.codecs import BlockSparse, Codec, Encoded, Offload, Quantize, SignAware
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
    out_sharding: Any = None,
    codec: Codec | None = None,
    seed: Seed = None,
    sink: Sink | None = None,
) -> Float[Array, "..."]:
    """Computes `jax.lax.dot_general` and saves `lhs` encoded.

    The result is bit-identical to `lax.dot_general`. The gradient of `lhs` is exact. The gradient
    of `rhs` is computed from the decoded `lhs`. If no gradient of `rhs` is taken, `lhs` is not
    saved. Flax layers accept the function as their `dot_general` argument.

    Args:
        lhs: Activations; axis 0 is the batch.
        rhs: Weights. They are saved exactly; as parameters they are in memory anyway.
        dimension_numbers: As in `lax.dot_general`.
        precision: As in `lax.dot_general`.
        preferred_element_type: As in `lax.dot_general`.
        out_sharding: As in `lax.dot_general`.
        codec: Codec of `lhs`. None calls `lax.dot_general`.
        seed: Integer scalar that selects the rounding noise of the codec.
        sink: Argument whose gradient is the sensitivity of each sample (`ops.Sink`). Ignored
            without a codec.

    Returns:
        The product.

    Raises:
        TypeError: If the codec cannot store the dtype of `lhs`.
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
    gradient = gradient_of_layer(codec, lhs, rhs, dimension_numbers, precision)
    return bilinear(stock, codec, lhs, rhs, seed, sink=sink, weight_gradient=gradient)


def gradient_of_layer(
    codec: Codec,
    lhs: Array,
    rhs: Array,
    dimension_numbers: DotDimensionNumbers,
    precision: lax.PrecisionLike,
) -> WeightGradient | None:
    """Returns what multiplies by the blocks of a linear layer's input; None of other products."""
    layer = [[*map(list, axes)] for axes in dimension_numbers] == [[[lhs.ndim - 1], [0]], [[], []]]
    if isinstance(inner_codec(codec), BlockSparse) and layer and rhs.ndim == 2:
        return layer_gradient(codec, lhs, rhs, rhs.dtype, precision)
    return None


def layer_gradient(
    codec: Codec,
    x: Float[Array, "batch ... features"],
    kernel: Float[Array, "features columns"],
    dtype: DTypeLike,
    precision: lax.PrecisionLike,
) -> WeightGradient:
    """Returns the function that computes a linear layer's weight gradient.

    Args:
        codec: Codec of the layer's input.
        x: The layer's input; only its shape and dtype are used.
        kernel: The weight; its columns and explicit sharding are those of the gradient.
        dtype: Dtype of the weight gradient.
        precision: Precision of the product.

    Returns:
        A function of the encoded input and the cotangent.
    """
    codec = inner_codec(codec)
    product: WeightGradient
    if isinstance(codec, BlockSparse):
        product = block_product.gradient(codec, x, kernel.shape[1], dtype, precision)
    else:
        product = functools.partial(block_product.by_dense, codec, precision=precision, dtype=dtype)

    return lambda code, cotangent: over_automatic_axes(product, (code, cotangent), like=kernel)


class Reads(NamedTuple):
    """The part of its left operand that a product reads.

    Attributes:
        part: Selects the part, from the left operand or from each array of its code. The arrays of
            a code have the axes of the operand. Their sizes are those of the operand or 1, but the
            last axis of packed codes may be shorter.
        product: Function of the part and the right operand; equal to the whole product.
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
    convolves: bool = False,
) -> Array:
    """Computes `stock(lhs, rhs)`, which is linear in each argument, and saves `lhs` encoded.

    Args:
        stock: The operation.
        codec: Codec of `lhs`.
        lhs: Left operand.
        rhs: Right operand. It is saved exactly.
        seed: Integer scalar that selects the rounding noise of the codec.
        code: Code of `lhs` that the operation that computed `lhs` made. It is saved in place of a
            new one.
        sink: Argument whose gradient is the sensitivity of each sample, or None.
        uses: How often each element of `lhs` meets each channel of the cotangent, on average. Only
            `sink` needs it.
        reads: The part of `lhs` that is saved and decoded. None is all.
        weight_gradient: Computes the gradient of `rhs` from the code and the cotangent, without the
            decoded `lhs`. None decodes `lhs`.
        convolves: Whether `stock` is a convolution. XLA for TPUs fuses its cotangent with what
            computes it, if no barrier stands between them. There is none for codes in few bits;
            with pooled codes the step needs more memory so.

    Returns:
        The result of `stock`.
    """
    part, product = Reads(lambda lhs: lhs, stock) if reads is None else reads
    stored = jax.eval_shape(part, lhs)
    codec.check(stored.shape, stored.dtype)
    check_sink(sink, lhs.shape)
    is_fused = codec.fuses_decode_on_tpu or (convolves and isinstance(codec, Quantize | SignAware))
    held_together = functools.partial(barriers.barrier_together, except_on_tpu=is_fused)
    travels = code is not None

    lhs, rhs, code, sink, seed = match_varying((lhs, rhs, code, sink, seed))
    like_lhs, like_rhs = type_like(lhs), type_like(rhs)
    optional, tree = jax.tree.flatten((code, sink))
    at_sink = 2 + len(jax.tree.leaves(code))

    class Bilinear(Differentiable[bool]):
        """The choice is whether the backward pass reads the operand with the code."""

        def evaluate(self, seed: Seed, arguments: list[Array]) -> list[Array]:
            return [stock(*arguments[:2])]

        def choose(self, seed: Seed, arguments: list[Array], differentiated: list[int]) -> bool:
            """Returns whether the backward pass reads `lhs`.

            Not, for example, if the kernel is frozen.
            """
            return any(i == 1 or i >= at_sink for i in differentiated)

        def forward(
            self, choice: bool, seed: Seed, arguments: list[Array]
        ) -> tuple[list[Array], Any]:
            lhs, rhs, *optional = arguments
            code, sink = jax.tree.unflatten(tree, optional)
            if not choice:
                return [stock(lhs, rhs)], (None, rhs)
            if code is None:
                coded = codec.encode(part(lhs), seed, importance(sink))
                (lhs, rhs), code = barriers.save_residual((lhs, rhs), coded, codec)
            elif isinstance(codec, Offload):
                rhs = barriers.await_host_copy(rhs, code)
            return [stock(lhs, rhs)], (code, arguments[1])

        def backward(self, choice: bool, residual: Any, cotangents: ByPosition) -> ByPosition:
            code, rhs = residual
            cotangent = cotangents[0]
            found: ByPosition = {}
            if choice:
                code, cotangent = held_together(code, cotangent)
                decode = by_row_kernel(codec.decode, exact=False, wanted=codec.kernels)
                decoded = decode(code)
                if travels and reads is not None:
                    decoded = part(
                        decoded
                    )  # rounding noise depends on the index in the whole array
                if sink is not None:
                    found[at_sink] = sensitivity(decoded, cotangent, uses)
                if weight_gradient is not None:
                    if travels:
                        arrays = jax.tree.map(lambda a: part(a) if a.ndim else a, code.arrays)
                        code = Encoded(arrays, stored.shape, stored.dtype, code.codec)
                    drhs = weight_gradient(code, cotangent)
                else:
                    transpose = jax.linear_transpose(lambda rhs: product(decoded, rhs), like_rhs)
                    (drhs,) = transpose(cotangent)
                found[1], cotangent = held_together(row_major(drhs), cotangent)
            (found[0],) = jax.linear_transpose(lambda lhs: stock(lhs, rhs), like_lhs)(cotangent)
            return found

    return Bilinear()(seed, lhs, rhs, *optional)[0]
