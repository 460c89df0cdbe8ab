"""LayerScale after a linear layer, which stores nothing of its own."""

from flax.linen.dtypes import promote_dtype
from jaxtyping import Array, Float

from jaxcomp import ops
from jaxcomp.codecs import Exact, noise
from jaxcomp.nn.affine import Affine
from jaxcomp.nn.linear import Linear


def scaled_linear(
    x: Float[Array, "batch ... features"], linear: Linear, scale: Affine
) -> Float[Array, "batch ... columns"]:
    """`scale(linear(x))` by `ops.scaled_linear`, if the scale has a codec, which is not used then.

    Without a codec, or with `Exact()`, the scale stores its input as in Flax. It stores it by its
    codec where it has a bias, or the linear layer a sink or a `preferred_element_type`.

    Args:
        x: What the linear layer reads; its codec stores it, exactly if it has none.
        linear: The layer.
        scale: LayerScale.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jaxcomp import Quantize
        >>> rngs = nnx.Rngs(0)
        >>> linear, scale = Linear(8, 2, rngs=rngs), Affine(2, use_bias=False, rngs=rngs)
        >>> linear.codec = scale.codec = Quantize(bits=2)
        >>> x = jnp.ones((3, 8))
        >>> bool((scaled_linear(x, linear, scale) == scale(linear(x))).all())
        True
    """
    stored = isinstance(scale.codec, Exact | None) or scale.bias is not None
    if stored or linear.sink is not None or linear.preferred_element_type is not None:
        return scale(linear(x))
    kernel, factor = linear.kernel[...], scale.scale[...]
    bias = None if linear.bias is None else linear.bias[...]
    (x, *_) = promote_dtype(x, kernel, bias, factor, dtype=linear.dtype)
    seed = noise.fingerprint(kernel)
    codec = linear.codec or Exact()
    return ops.scaled_linear(
        x, kernel, bias, factor, precision=linear.precision, codec=codec, seed=seed
    )
