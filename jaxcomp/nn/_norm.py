"""Flax's normalisation layers with a compressed input."""

import jax
from flax import nnx
from flax.nnx.module import first_from
from jaxtyping import Array, Float

from jaxcomp import ops
from jaxcomp.codecs import Codec, noise
from jaxcomp.nn._coded import Coded


class BatchNorm(Coded, nnx.BatchNorm):
    """`flax.nnx.BatchNorm` that keeps its input for the backward pass as `codec` stores it.

    Constructor, parameters, running statistics and results are those of `flax.nnx.BatchNorm`; with
    running averages in use (evaluation) it is that layer.

    Args:
        *args: As `flax.nnx.BatchNorm`.
        codec: How the input is stored; None leaves the layer as it is in Flax.
        **kwargs: As `flax.nnx.BatchNorm`.

    Example:
        >>> from jaxcomp import Quantize
        >>> norm = BatchNorm(8, codec=Quantize(bits=2), rngs=nnx.Rngs(0))
        >>> norm(jax.numpy.ones((4, 8))).shape
        (4, 8)
    """

    kind = "batch_norm"

    def __call__(
        self,
        x: Float[Array, "..."],
        use_running_average: bool | None = None,
        *,
        mask: Array | None = None,
    ) -> Float[Array, "..."]:
        """Normalises `x`; arguments as in `flax.nnx.BatchNorm`."""
        running = first_from(
            use_running_average,
            self.use_running_average,
            error_msg="use_running_average: set it in the constructor, in the call or by nnx.view",
        )
        if self.codec is None or running:
            return super().__call__(x, running, mask=mask)
        scale = None if self.scale is None else self.scale[...]
        bias = None if self.bias is None else self.bias[...]
        seed = noise.fingerprint(*(a for a in (scale, bias) if a is not None))
        variables = x, self.mean[...], self.var[...], scale, bias
        x, _, _, scale, bias = self.promote_dtype(variables, dtype=self.dtype)
        y, mean, var = ops.batch_norm(
            x,
            scale,
            bias,
            axis=self.axis,
            epsilon=self.epsilon,
            use_fast_variance=self.use_fast_variance,
            axis_name=self.axis_name,
            axis_index_groups=self.axis_index_groups,
            mask=mask,
            codec=self.codec,
            seed=seed,
            **self.sink_argument(),
        )
        self.update(mean, var)
        return y

    def update(self, mean: Float[Array, " features"], var: Float[Array, " features"]) -> None:
        """Moves the running statistics towards a batch's, as Flax does."""
        for average, value in ((self.mean, mean), (self.var, var)):
            updated = self.momentum * average[...] + (1 - self.momentum) * value
            average[...] = jax.lax.stop_gradient(updated)


class LayerNorm(Coded, nnx.LayerNorm):
    """`flax.nnx.LayerNorm` that keeps its input for the backward pass as `codec` stores it.

    Constructor, parameters and results are those of `flax.nnx.LayerNorm`.

    Args:
        *args: As `flax.nnx.LayerNorm`.
        codec: How the input is stored; None leaves the layer as it is in Flax.
        **kwargs: As `flax.nnx.LayerNorm`; with a codec both axes are -1.

    Example:
        >>> from jaxcomp import Quantize
        >>> norm = LayerNorm(8, codec=Quantize(bits=2), rngs=nnx.Rngs(0))
        >>> norm(jax.numpy.ones((4, 8))).shape
        (4, 8)
    """

    kind = "layer_norm"

    def check_codec(self, codec: Codec | None) -> None:
        """Raises an error if the layer cannot store by a codec."""
        super().check_codec(codec)
        if codec is not None and (self.reduction_axes, self.feature_axes) != (-1, -1):
            raise ValueError(f"codec={codec}: expected reduction_axes=-1 and feature_axes=-1")

    def __call__(self, x: Float[Array, "..."], *, mask: Array | None = None) -> Float[Array, "..."]:
        """Normalises `x`; arguments as in `flax.nnx.LayerNorm`."""
        if self.codec is None:
            return super().__call__(x, mask=mask)
        scale = None if self.scale is None else self.scale[...]
        bias = None if self.bias is None else self.bias[...]
        seed = noise.fingerprint(*(a for a in (scale, bias) if a is not None))
        x, scale, bias = self.promote_dtype((x, scale, bias), dtype=self.dtype)
        return ops.layer_norm(
            x,
            scale,
            bias,
            epsilon=self.epsilon,
            use_fast_variance=self.use_fast_variance,
            axis_name=self.axis_name,
            axis_index_groups=self.axis_index_groups,
            mask=mask,
            codec=self.codec,
            seed=seed,
            **self.sink_argument(),
        )
