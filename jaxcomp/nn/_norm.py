"""Flax's normalisation layers with a compressed saved input."""

import jax
from flax import nnx
from flax.nnx.module import first_from
from jaxtyping import Array, Float

from jaxcomp import ops
from jaxcomp.codecs import Codec
from jaxcomp.nn._coded import Coded


class BatchNorm(Coded, nnx.BatchNorm):
    """`flax.nnx.BatchNorm` that saves its input encoded (`ops.batch_norm`).

    Constructor, parameters, running statistics and results are those of `flax.nnx.BatchNorm`. With
    running averages (evaluation) it is Flax's layer.

    Args:
        *args: As in `flax.nnx.BatchNorm`.
        codec: Codec of the input. None is Flax's layer.
        **kwargs: As in `flax.nnx.BatchNorm`.

    Raises:
        TypeError: If `codec` is not a codec.
        ValueError: If `codec` is not for this kind of operation.

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
        seed = self.seed_of_call(x, *(a for a in (scale, bias) if a is not None))
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
        """Updates the running statistics by those of a batch, as Flax does.

        Args:
            mean: Mean of the batch, float32.
            var: Biased variance of the batch, float32.
        """
        for average, value in ((self.mean, mean), (self.var, var)):
            before = average[...]
            updated = self.momentum * before + (1 - self.momentum) * value
            # An assignment to `average[...]` takes much of the time of tracing a deep network: Flax
            # asks the tracers for a sharding, and JAX searches the whole trace for a message.
            average.set_value(jax.lax.stop_gradient(updated).astype(before.dtype))


class LayerNorm(Coded, nnx.LayerNorm):
    """`flax.nnx.LayerNorm` that saves its input encoded (`ops.layer_norm`).

    Constructor, parameters and results are those of `flax.nnx.LayerNorm`.

    Args:
        *args: As in `flax.nnx.LayerNorm`.
        codec: Codec of the input. None is Flax's layer.
        **kwargs: As in `flax.nnx.LayerNorm`. With a codec, `reduction_axes` and `feature_axes` must
            be -1.

    Raises:
        TypeError: If `codec` is not a codec.
        ValueError: If `codec` is not for this kind of operation, or is given with other axes.

    Example:
        >>> from jaxcomp import Quantize
        >>> norm = LayerNorm(8, codec=Quantize(bits=2), rngs=nnx.Rngs(0))
        >>> norm(jax.numpy.ones((4, 8))).shape
        (4, 8)
    """

    kind = "layer_norm"

    def check_codec(self, codec: Codec | None) -> None:
        """Checks that the layer can save its input by a codec.

        Args:
            codec: The codec, or None.

        Raises:
            TypeError: If `codec` is not a codec.
            ValueError: If `codec` is not for this kind of operation, or is given with other axes
                than -1.
        """
        super().check_codec(codec)
        if codec is not None and (self.reduction_axes, self.feature_axes) != (-1, -1):
            raise ValueError(f"codec={codec}: expected reduction_axes=-1 and feature_axes=-1")

    def __call__(self, x: Float[Array, "..."], *, mask: Array | None = None) -> Float[Array, "..."]:
        """Normalises `x`; arguments as in `flax.nnx.LayerNorm`."""
        if self.codec is None:
            return super().__call__(x, mask=mask)
        scale = None if self.scale is None else self.scale[...]
        bias = None if self.bias is None else self.bias[...]
        seed = self.seed_of_call(x, *(a for a in (scale, bias) if a is not None))
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
