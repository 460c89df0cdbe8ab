"""A linear layer and LayerScale as one operation that saves only the layer's input."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxcomp._core import barriers
from jaxcomp._core.custom_derivative import Differentiable
from jaxcomp._core.linear_map import ByPosition
from jaxcomp._core.shard_map import match_varying
from jaxcomp.codecs import Codec
from jaxcomp.codecs._codec import Seed
from jaxcomp.ops._linear import layer_gradient


def scaled_linear(
    x: Float[Array, "batch ... features"],
    kernel: Float[Array, "features columns"],
    bias: Float[Array, " columns"] | None,
    scale: Float[Array, " columns"],
    *,
    precision: lax.PrecisionLike = None,
    codec: Codec,
    seed: Seed = None,
) -> Float[Array, "batch ... columns"]:
    """Computes `(x @ kernel + bias) * scale` and saves `x` encoded.

    The result is bit-identical to that of the three operations in the dtype of `x`. Gradients are
    those of the equal expression `x @ (kernel * scale) + bias * scale`. The gradient of `scale` is
    a sum over the weight gradient, so the operation saves no other activation. The gradients of `x`
    and `bias` are exact. Those of `kernel` and `scale` are computed from the decoded `x`, so they
    are unbiased if the codec is.

    Source: LayerScale (Touvron et al., arXiv:2103.17239, section 2).

    Args:
        x: float32, bfloat16 or float16 activations; axis 0 is the batch.
        kernel: Weights. Parameters may have other dtypes than `x`; their gradients are summed in
            float32 or wider.
        bias: Offset of each column, or None.
        scale: Factor of each column.
        precision: Precision of the products.
        codec: Codec of `x`.
        seed: Integer scalar that selects the rounding noise of the codec.

    Returns:
        The result in the dtype of `x`.

    Raises:
        TypeError: If the codec cannot store the dtype of `x`.
        ValueError: If the codec cannot store the shape of `x`.

    Example:
        >>> import jax
        >>> from jaxcomp import Quantize
        >>> x, kernel, scale = jnp.ones((4, 2)), jnp.array([[1.0], [2.0]]), jnp.array([0.5])
        >>> f = lambda scale: scaled_linear(x, kernel, None, scale, codec=Quantize(bits=2)).sum()
        >>> f(scale).item(), jax.grad(f)(scale).tolist()
        (6.0, [12.0])
    """
    codec.check(x.shape, x.dtype)
    x, kernel, bias, scale, seed = match_varying((x, kernel, bias, scale, seed))
    wide = jnp.result_type(kernel.dtype, scale.dtype, jnp.float32)
    product = layer_gradient(codec, x, kernel, wide, precision)
    others = tuple(range(x.ndim - 1))

    def times(x: Array, kernel: Array) -> Array:
        return jnp.tensordot(x, kernel.astype(x.dtype), 1, precision=precision)

    def by_column(x: Array, row: Array, operation: Callable[[Array, Array], Array]) -> Array:
        return operation(x, jnp.expand_dims(row.astype(x.dtype), others))

    def stock(x: Array, kernel: Array, scale: Array, bias: Array | None = None) -> Array:
        y = times(x, kernel)
        y = y if bias is None else by_column(y, bias, lax.add)
        return by_column(y, scale, lax.mul)

    class ScaledLinear(Differentiable[bool]):
        """The choice is whether the backward pass reads the operand with the code."""

        def evaluate(self, seed: Seed, arguments: list[Array]) -> list[Array]:
            return [stock(*arguments)]

        def choose(self, seed: Seed, arguments: list[Array], differentiated: list[int]) -> bool:
            """Returns whether the backward pass reads `x`: not if kernel and scale are frozen."""
            return 1 in differentiated or 2 in differentiated

        def forward(
            self, choice: bool, seed: Seed, arguments: list[Array]
        ) -> tuple[list[Array], Any]:
            code = None
            given = arguments
            if choice:
                given, code = barriers.save_residual(
                    arguments, codec.encode(arguments[0], seed), codec
                )
            return [stock(*given)], (code, arguments[1:])

        def backward(self, choice: bool, residual: Any, cotangents: ByPosition) -> ByPosition:
            code, (kernel, scale, *biases) = residual
            cotangent = cotangents[0]
            total = cotangent.sum(others, dtype=wide)
            found: ByPosition = {}
            if bias is not None:
                found[3] = (total * scale).astype(bias.dtype)
            if choice:
                code, cotangent = barriers.barrier_together(code, cotangent)
                of_scaled, cotangent = barriers.barrier_together(
                    product(code, cotangent), cotangent
                )
                found[1] = (of_scaled * scale[None].astype(wide)).astype(kernel.dtype)
                dscale = (of_scaled * kernel.astype(wide)).sum(0)
                found[2] = sum((total * bias for bias in biases), dscale).astype(scale.dtype)
            if x.dtype == jnp.float16:  # a kernel times LayerScale's 1e-6 would underflow
                cotangent = by_column(cotangent, scale, lax.mul)
            else:
                kernel = kernel.astype(wide) * scale[None].astype(wide)
            return found | {0: times(cotangent, kernel.T)}

    return ScaledLinear()(seed, x, kernel, scale, *([] if bias is None else [bias]))[0]
