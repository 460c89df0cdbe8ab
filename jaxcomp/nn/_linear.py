"""Flax's convolutions and linear layers with a compressed saved input."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.dtypes import promote_dtype
from flax.linen.linear import canonicalize_padding
from jaxtyping import Array, Float

from jaxcomp import ops
from jaxcomp.codecs import Codec, Exact, noise
from jaxcomp.nn._affine import Affine
from jaxcomp.nn._coded import Coded, CodedOp, giving
from jaxcomp.ops import CodedArray, value


class Conv(Coded, nnx.Conv):
    """`flax.nnx.Conv` that saves its input encoded (`ops.conv_general_dilated`).

    Constructor, parameters, state and results are those of `flax.nnx.Conv`.

    Args:
        *args: As in `flax.nnx.Conv`.
        codec: Codec of the input. None is Flax's layer.
        **kwargs: As in `flax.nnx.Conv`, without `conv_general_dilated`.

    Raises:
        TypeError: If `codec` is not a codec.
        ValueError: If `codec` is not for this kind of operation.

    Example:
        >>> from jaxcomp import Quantize
        >>> conv = Conv(3, 8, (3, 3), codec=Quantize(bits=2), rngs=nnx.Rngs(0))
        >>> conv.codec.bits
        2
    """

    kind = "conv"

    def __init__(self, *args: Any, codec: Codec | None = None, **kwargs: Any) -> None:
        op = ops.conv_general_dilated
        super().__init__(*args, conv_general_dilated=op, codec=codec, **kwargs)

    def __call__(
        self, inputs: Float[Array, "..."] | CodedArray, out_sharding: Any = None
    ) -> Float[Array, "..."]:
        """Convolves `inputs`, as Flax does.

        Args:
            inputs: Array, or `CodedArray`. The code of a `CodedArray` is saved in place of a new
                one.
            out_sharding: As in `flax.nnx.Conv`.
        """
        activation = inputs if isinstance(inputs, CodedArray) and inputs.code is not None else None
        with giving(activation, **({} if activation else self.sink_argument())):
            return super().__call__(value(inputs), out_sharding)

    @property
    def codec(self) -> Codec | None:
        """Codec of the input."""
        op = self.conv_general_dilated
        return op.codec if isinstance(op, CodedOp) else None

    @codec.setter
    def codec(self, codec: Codec | None) -> None:
        self.check_codec(codec)
        self.conv_general_dilated = CodedOp(ops.conv_general_dilated, codec)


class Stem(nnx.Conv):
    """`flax.nnx.Conv` of the batch, which is in memory anyway."""


class ConvTranspose(Coded, nnx.ConvTranspose):
    """`flax.nnx.ConvTranspose` that saves its input encoded (`ops.conv_transpose`).

    Constructor, parameters, state and results are those of `flax.nnx.ConvTranspose`.

    Args:
        *args: As in `flax.nnx.ConvTranspose`.
        codec: Codec of the input. None is Flax's layer.
        **kwargs: As in `flax.nnx.ConvTranspose`. padding="CIRCULAR" needs `codec=None`.

    Raises:
        TypeError: If `codec` is not a codec.
        ValueError: If `codec` is not for this kind of operation, or is given with
            padding="CIRCULAR".

    Example:
        >>> from jaxcomp import Quantize
        >>> conv = ConvTranspose(3, 8, (2, 2), 2, codec=Quantize(bits=2), rngs=nnx.Rngs(0))
        >>> conv(jnp.ones((1, 4, 4, 3))).shape
        (1, 8, 8, 8)
    """

    kind = "conv"

    def check_codec(self, codec: Codec | None) -> None:
        """Checks that the layer can save its input by a codec.

        Args:
            codec: The codec, or None.

        Raises:
            TypeError: If `codec` is not a codec.
            ValueError: If `codec` is not for this kind of operation, or is given with
                padding="CIRCULAR".
        """
        super().check_codec(codec)
        if codec is not None and self.padding == "CIRCULAR":
            raise ValueError(f"codec={codec}: has no form for padding='CIRCULAR'")

    def __call__(self, inputs: Float[Array, "..."]) -> Float[Array, "..."]:
        """Convolves `inputs`, as Flax does."""
        if self.codec is None:
            return super().__call__(inputs)
        rank = len(self.kernel_size) + 1
        kernel = self.kernel[...] if self.mask is None else self.kernel[...] * self.mask
        bias = None if self.bias is None else self.bias[...]
        seed = noise.fingerprint(kernel)
        variables = inputs.reshape(-1, *inputs.shape[-rank:]), kernel, bias
        x, kernel, bias = self.promote_dtype(variables, dtype=self.dtype)
        y = ops.conv_transpose(
            x,
            kernel,
            _for_each_axis(self.strides, rank - 1),
            canonicalize_padding(self.padding, rank - 1),
            _for_each_axis(self.kernel_dilation, rank - 1),
            transpose_kernel=self.transpose_kernel,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
            codec=self.codec,
            seed=seed,
            **self.sink_argument(),
        )
        y = y if bias is None else y + jnp.expand_dims(bias, range(rank))
        return y.reshape(*inputs.shape[:-rank], *y.shape[1:])


def _for_each_axis(value: int | Sequence[int] | None, axes: int) -> tuple[int, ...]:
    value = 1 if value is None else value
    return (value,) * axes if isinstance(value, int) else tuple(value)


class Linear(Coded, nnx.Linear):
    """`flax.nnx.Linear` that saves its input encoded (`ops.dot_general`).

    Constructor, parameters, state and results are those of `flax.nnx.Linear`.

    Args:
        *args: As in `flax.nnx.Linear`.
        codec: Codec of the input. None is Flax's layer.
        **kwargs: As in `flax.nnx.Linear`, without `dot_general`.

    Raises:
        TypeError: If `codec` is not a codec.
        ValueError: If `codec` is not for this kind of operation.

    Example:
        >>> from jaxcomp import Quantize
        >>> Linear(3, 8, codec=Quantize(bits=4), rngs=nnx.Rngs(0)).codec.bits
        4
    """

    kind = "dot"

    def __init__(self, *args: Any, codec: Codec | None = None, **kwargs: Any) -> None:
        super().__init__(*args, dot_general=ops.dot_general, codec=codec, **kwargs)

    def __call__(
        self,
        inputs: Float[Array, "..."],
        out_sharding: Any = None,
        *,
        scale: Affine | None = None,
    ) -> Float[Array, "..."]:
        """Multiplies `inputs` by the kernel, as Flax does.

        Args:
            inputs: Activations; axis 0 is the batch.
            out_sharding: As in `flax.nnx.Linear`.
            scale: LayerScale to apply to the result. If both layers have a codec and compute in the
                same dtype, they run as `ops.scaled_linear`, and the LayerScale saves nothing of its
                own.
        """
        if scale is not None and self._is_fused_with(scale, inputs, out_sharding):
            kernel, factor = self.kernel[...], scale.scale[...]
            bias = None if self.bias is None else self.bias[...]
            (x, *_) = self.promote_dtype((inputs, kernel, bias), dtype=self.dtype)
            assert self.codec is not None
            return ops.scaled_linear(
                x,
                kernel,
                bias,
                factor,
                precision=self.precision,
                codec=self.codec,
                seed=noise.fingerprint(kernel),
            )
        with giving(None, **self.sink_argument()):
            y = super().__call__(inputs, out_sharding)
        return y if scale is None else scale(y)

    def _is_fused_with(self, scale: Affine, inputs: Array, out_sharding: Any) -> bool:
        """Returns whether `ops.scaled_linear` computes both layers and saves less."""
        if self.codec is None or isinstance(scale.codec, Exact | None) or scale.bias is not None:
            return False
        if not (self.sink is self.preferred_element_type is out_sharding is None):
            return False
        parameters = [p[...] for p in (self.kernel, self.bias) if p is not None]
        x, *_ = jax.eval_shape(
            lambda *args: self.promote_dtype(args, dtype=self.dtype), inputs, *parameters
        )
        y, _ = jax.eval_shape(
            lambda *args: promote_dtype(*args, dtype=scale.dtype), x, scale.scale[...]
        )
        return bool(x.dtype == y.dtype)

    @property
    def codec(self) -> Codec | None:
        """Codec of the input."""
        op = self.dot_general
        return op.codec if isinstance(op, CodedOp) else None

    @codec.setter
    def codec(self, codec: Codec | None) -> None:
        self.check_codec(codec)
        self.dot_general = CodedOp(ops.dot_general, codec)
