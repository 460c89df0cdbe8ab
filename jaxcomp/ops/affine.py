"""Scaling and shifting of each feature, whose input waits for the backward pass compressed."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxcomp.codecs import Codec
from jaxcomp.codecs.codec import Seed
from jaxcomp.ops.linear import bilinear


def affine(
    x: Float[Array, "*batch features"],
    scale: Float[Array, " features"],
    bias: Float[Array, " features"] | None = None,
    *,
    codec: Codec | None = None,
    seed: Seed = None,
) -> Float[Array, "*batch features"]:
    """`scale * x + bias` that keeps `x` for the backward pass as `codec` stores it.

    The result is bit-identical to `x * scale + bias`; the gradients of `x` and `bias` are exact,
    that of `scale` is the exact one at the decoded `x`, so it is unbiased where the codec is. The
    affine layer of ResMLP (Touvron et al., arXiv:2105.03404, section 2) and, without `bias`,
    LayerScale (Touvron et al., arXiv:2103.17239, section 2).

    Args:
        x: Activations; axis 0 is the batch.
        scale: Factor of each feature.
        bias: Is added to each feature, or None.
        codec: How `x` is stored; None leaves differentiation to JAX.
        seed: Redraws the rounding noise of the codec.

    Returns:
        The result in the dtype of the arguments together.

    Raises:
        TypeError: If `x` is not a floating-point array.
        ValueError: If the codec cannot store the shape of `x`.

    Example:
        >>> import jax
        >>> from jaxcomp import Quantize
        >>> x = jnp.array([[0.0, 1.0], [3.0, 3.0]])
        >>> f = lambda scale: affine(x, scale, codec=Quantize(bits=2)).sum()
        >>> jax.grad(f)(jnp.ones(2)).tolist()
        [3.0, 4.0]
    """
    others = tuple(range(x.ndim - 1))

    def scaled(x: Array, scale: Array) -> Array:
        return x * jnp.expand_dims(scale, others)

    y = scaled(x, scale) if codec is None else bilinear(scaled, codec, x, scale, seed)
    return y if bias is None else y + jnp.expand_dims(bias, others)
