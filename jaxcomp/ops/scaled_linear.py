"""A linear layer and LayerScale as one operation, which stores the layer's input alone."""

import typing

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxcomp import residuals
from jaxcomp.codecs import Codec
from jaxcomp.codecs.codec import Seed
from jaxcomp.ops.linear import is_argument, is_perturbed, layer_gradient


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
    """`(x @ kernel + bias) * scale` that keeps `x` for the backward pass as `codec` stores it.

    The result is bit-identical to that of the three operations in the dtype of `x`. They are
    `x @ (kernel * scale) + bias * scale`, too, and of that the gradients are made: the scale's is a
    sum over the weight's, so that the layer's result does not wait for the backward pass, nor is a
    cotangent multiplied by the scale. The gradient of `x` is exact, those of the parameters are
    exact at the decoded `x`. LayerScale is Touvron et al., arXiv:2103.17239, section 2.

    Args:
        x: Activations; axis 0 is the batch.
        kernel: Weights, in any dtype; their product with the scale is made in it.
        bias: Is added to each column, or None.
        scale: Factor of each column.
        precision: Of the products.
        codec: How `x` is stored.
        seed: Redraws the rounding noise of the codec.

    Returns:
        The result in the dtype of `x`.

    Raises:
        TypeError: If `x` is not a floating-point array.
        ValueError: If the codec cannot store the shape of `x`.

    Example:
        >>> from jaxcomp import Quantize
        >>> x, kernel, scale = jnp.ones((4, 2)), jnp.array([[1.0], [2.0]]), jnp.array([0.5])
        >>> f = lambda scale: scaled_linear(x, kernel, None, scale, codec=Quantize(bits=2)).sum()
        >>> f(scale).item(), jax.grad(f)(scale).tolist()
        (6.0, [12.0])
    """
    codec.check(x.shape, x.dtype)
    gradient = layer_gradient(codec, x, kernel.shape[1], kernel.dtype, precision)
    others = tuple(range(x.ndim - 1))

    def stock(x: Array, given: tuple[Array, Array | None, Array]) -> Array:
        kernel, bias, scale = jax.tree.map(lambda a: a.astype(x.dtype), given)
        y = jnp.tensordot(x, kernel, 1, precision=precision)
        y = y if bias is None else y + jnp.expand_dims(bias, others)
        return y * jnp.expand_dims(scale, others)

    @jax.custom_vjp
    def op(x: Array, scaled: typing.Any, given: typing.Any, seed: Seed) -> Array:
        return stock(x, given)

    def forward(*arguments: typing.Any) -> typing.Any:
        x, scaled, given, seed = jax.tree.map(lambda a: a.value, arguments, is_leaf=is_argument)
        if not is_perturbed(arguments[1]):  # as of frozen parameters: nothing reads `x`
            return stock(x, given), (None, scaled[0])
        (x, given), code = residuals.keep((x, given), codec.encode(x, seed), codec)
        return stock(x, given), (code, scaled[0])

    def backward(residual: typing.Any, cotangent: Array) -> typing.Any:
        code, kernel = residual
        dkernel = dbias = None
        if code is not None:
            code, cotangent = residuals.tie(code, cotangent)
            dkernel, cotangent = residuals.tie(gradient(code, cotangent), cotangent)
            if bias is not None:
                dbias = cotangent.sum(others, dtype=jnp.float32).astype(bias.dtype)
        dx = jnp.tensordot(cotangent, kernel.astype(x.dtype), ((-1,), (1,)), precision=precision)
        return dx, (dkernel, dbias), None, None

    op.defvjp(forward, backward, symbolic_zeros=True)
    scaled = kernel * scale[None], None if bias is None else bias * scale
    return op(x, scaled, (kernel, bias, scale), seed)
