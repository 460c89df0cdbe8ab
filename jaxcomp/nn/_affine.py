"""Per-feature scaling and shifting as a layer, with a compressed saved input."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.linen.dtypes import promote_dtype
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxcomp import ops
from jaxcomp.codecs import Codec, noise
from jaxcomp.nn._coded import Coded


class Affine(Coded, nnx.Module):
    """Computes `scale * x + bias` for each feature and saves its input encoded (`ops.affine`).

    Source: ResMLP's replacement of a norm (Touvron et al., arXiv:2105.03404, section 2). Without
    bias and with a small `scale_init` it is LayerScale (Touvron et al., arXiv:2103.17239, section
    2).

    Args:
        num_features: Size of the last axis of the input.
        use_bias: Whether to add a bias, initially 0.
        scale_init: Initial value of all scales.
        codec: Codec of the input. None leaves differentiation to JAX.
        dtype: Dtype of the computation. None is the promoted dtype of input and parameters.
        param_dtype: Dtype of the parameters.
        rngs: As in Flax's layers; unused, because nothing is random.

    Raises:
        TypeError: If `codec` is not a codec.
        ValueError: If `codec` is not for this kind of operation.

    Example:
        >>> from jaxcomp import Quantize
        >>> layer = Affine(2, scale_init=0.1, codec=Quantize(bits=4), rngs=nnx.Rngs(0))
        >>> layer(jnp.array([[10.0, 20.0]])).tolist()
        [[1.0, 2.0]]
    """

    kind = "affine"

    def __init__(
        self,
        num_features: int,
        *,
        use_bias: bool = True,
        scale_init: float = 1.0,
        codec: Codec | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.scale = nnx.Param(jnp.full(num_features, scale_init, param_dtype))
        self.bias = nnx.Param(jnp.zeros(num_features, param_dtype)) if use_bias else None
        self.dtype = dtype
        super().__init__(codec=codec)

    def __call__(self, x: Float[Array, "*batch features"]) -> Float[Array, "*batch features"]:
        """Returns `scale * x + bias`."""
        parameters = [self.scale[...], *([] if self.bias is None else [self.bias[...]])]
        seed = None if self.codec is None else noise.fingerprint(*parameters)
        promoted: list[Any] = promote_dtype(x, *parameters, dtype=self.dtype)
        return ops.affine(*promoted, codec=self.codec, seed=seed)
