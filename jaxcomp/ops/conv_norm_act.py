"""A convolution, its norm, addition and ReLU as one operation."""

import typing
from collections.abc import Sequence

from jaxtyping import Array, Float

from jaxcomp.codecs import Codec, Offload, SignAware
from jaxcomp.codecs.codec import Seed
from jaxcomp.ops.activated import Activation
from jaxcomp.ops.conv import conv_general_dilated
from jaxcomp.ops.norm_act import Statistics, norm_act

_SPATIAL = "DHW"


def conv_norm_act(
    x: Float[Array, "batch ... channels"] | Activation,
    kernel: Float[Array, "... channels features"],
    scale: Float[Array, " features"],
    bias: Float[Array, " features"],
    residual: Float[Array, "batch ... features"] | Activation | None = None,
    *,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    input_codec: Codec | None = None,
    codec: SignAware | Offload,
    seed: Seed = None,
    **norm: typing.Any,
) -> tuple[Activation, Statistics, Statistics]:
    """`relu(batch_norm(conv(x)) + residual)` with one code for norm, ReLU and what reads them.

    Of an `Activation` the convolution keeps the code that came with it, so a chain of these stores
    one code for each; `nn.ConvNormAct` is the same with parameters and running statistics.

    Args:
        x: Input, channels last, of 1 to 3 spatial dimensions.
        kernel: Of the convolution.
        scale: Of the norm.
        bias: Of the norm.
        residual: As `norm_act`.
        window_strides: As `lax.conv_general_dilated`.
        padding: As `lax.conv_general_dilated`.
        input_codec: How `x` is stored if it brings no code; None is exactly.
        codec: As `norm_act`.
        seed: Redraws the rounding noise.
        **norm: Further arguments of `norm_act`.

    Returns:
        As `norm_act`.

    Raises:
        TypeError: If `x` is not a floating-point array.
        ValueError: If the shapes do not fit, or as `norm_act`.

    Example:
        >>> import jax.numpy as jnp
        >>> x, kernel = jnp.ones((2, 8, 8, 3)), jnp.ones((3, 3, 3, 4))
        >>> options = dict(window_strides=(1, 1), padding="SAME", codec=SignAware(bits=4))
        >>> y, *_ = conv_norm_act(x, kernel, jnp.ones(4), jnp.zeros(4), **options)
        >>> y, *_ = conv_norm_act(y, jnp.ones((1, 1, 4, 4)), jnp.ones(4), jnp.zeros(4), **options)
        >>> y.value.shape
        (2, 8, 8, 4)
    """
    rank = kernel.ndim - 2
    if not 1 <= rank <= len(_SPATIAL):
        raise ValueError(f"kernel of shape {kernel.shape}: expected 1 to 3 spatial dimensions")
    axes = _SPATIAL[-rank:]
    layout = f"N{axes}C", f"{axes}IO", f"N{axes}C"
    y = conv_general_dilated(
        x,
        kernel,
        window_strides,
        padding,
        dimension_numbers=layout,
        codec=input_codec,
        seed=seed,
    )
    return norm_act(y, scale, bias, residual, codec=codec, seed=seed, **norm)
