"""Activation functions, dropout and pooling as modules, which a policy can select by their path."""

import dataclasses
import math
from typing import Any, cast

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxcomp import ops
from jaxcomp.codecs import Codec, Packed, SignAware
from jaxcomp.codecs._offload import inner_codec, placed_like
from jaxcomp.nn._coded import Coded, count_elements
from jaxcomp.ops import CodedArray, Padding, encode_activation, value


class ReLU(Coded, nnx.Module):
    """`flax.nnx.relu` as a layer that saves a packed mask.

    Args:
        codec: `Packed(bits=1)`, or `Offload` of it. None calls Flax's function.

    Raises:
        TypeError: If `codec` is not a codec.
        ValueError: If `codec` does not store masks.

    Example:
        >>> import jax.numpy as jnp
        >>> ReLU(codec=Packed(bits=1))(jnp.array([-1.0, 2.0])).tolist()
        [0.0, 2.0]
    """

    kind = "relu"

    def __init__(self, codec: Codec | None = None) -> None:
        super().__init__(codec=codec)

    def check_codec(self, codec: Codec | None) -> None:
        """Checks that the codec is `Packed(bits=1)`, `Offload` of it, `Exact()` or None."""
        super().check_codec(codec)
        _check_mask(codec)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Returns max(x, 0)."""
        return nnx.relu(x) if self.codec is None else ops.relu(x, codec=self.codec)


class GELU(Coded, nnx.Module):
    """`flax.nnx.gelu` as a layer that saves its encoded derivative (`ops.gelu`).

    The layer has no parameters from which to derive a seed, so the seed is a hash of a few elements
    of its input (`noise.spot_check`).

    Args:
        approximate: Whether to use the tanh approximation, as in `flax.nnx.gelu`.
        codec: Codec of the derivative. None calls Flax's function.

    Raises:
        TypeError: If `codec` is not a codec.
        ValueError: If `codec` does not store derivatives.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxcomp import Quantize
        >>> GELU(codec=Quantize(bits=2))(jnp.array([0.0])).tolist()
        [0.0]
    """

    kind = "gelu"

    def __init__(self, approximate: bool = True, codec: Codec | None = None) -> None:
        super().__init__(codec=codec)
        self.approximate = approximate

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Returns x times the cumulative distribution function of the normal distribution at x."""
        return ops.gelu(x, self.approximate, codec=self.codec, seed=self.seed_of_call(x))


class SiLU(Coded, nnx.Module):
    """`flax.nnx.silu` as a layer that saves its encoded derivative (`ops.silu`).

    Its rounding noise is as that of `GELU`.

    Args:
        codec: Codec of the derivative. None calls Flax's function.

    Raises:
        TypeError: If `codec` is not a codec.
        ValueError: If `codec` does not store derivatives.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxcomp import Quantize
        >>> SiLU(codec=Quantize(bits=2))(jnp.array([0.0])).tolist()
        [0.0]
    """

    kind = "silu"

    def __init__(self, codec: Codec | None = None) -> None:
        super().__init__(codec=codec)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Returns x times its sigmoid."""
        return ops.silu(x, codec=self.codec, seed=self.seed_of_call(x))


class Dropout(Coded, nnx.Dropout):
    """`flax.nnx.Dropout` that saves a packed mask.

    Constructor, random numbers and results are those of `flax.nnx.Dropout`.

    Args:
        *args: As in `flax.nnx.Dropout`.
        codec: `Packed(bits=1)`, or `Offload` of it. None is Flax's layer.
        **kwargs: As in `flax.nnx.Dropout`.

    Raises:
        TypeError: If `codec` is not a codec.
        ValueError: If `codec` does not store masks.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = Dropout(0.5, codec=Packed(bits=1), rngs=nnx.Rngs(0))
        >>> float(layer(jnp.ones(100)).max())
        2.0
    """

    kind = "dropout"

    def check_codec(self, codec: Codec | None) -> None:
        """Checks that the codec is `Packed(bits=1)`, `Offload` of it, `Exact()` or None."""
        super().check_codec(codec)
        _check_mask(codec)

    def __call__(
        self,
        inputs: Float[Array, "..."],
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> Float[Array, "..."]:
        """Drops elements of `inputs`; arguments as in `flax.nnx.Dropout`.

        Raises:
            ValueError: If neither the call nor the constructor got `rngs`.
        """
        off = self.deterministic if deterministic is None else deterministic
        if self.codec is None or off is not False or not 0 < self.rate < 1:
            return super().__call__(inputs, deterministic=deterministic, rngs=rngs)
        source = self.rngs if rngs is None else rngs
        if isinstance(source, nnx.Rngs):
            source = source[self.rng_collection]
        if source is None:
            raise ValueError("rngs: expected some in the call or the constructor")
        key = source() if isinstance(source, nnx.RngStream) else source
        return ops.dropout(inputs, key, self.rate, self.broadcast_dims, codec=self.codec)


def _check_mask(codec: Codec | None) -> None:
    packed = codec and inner_codec(codec)
    if isinstance(packed, Packed) and packed.bits != 1:
        raise ValueError(f"codec={codec}: expected Packed(bits=1), since a mask has one bit")


class MaxPool(Coded, nnx.Module):
    """`flax.nnx.max_pool` as a layer that saves packed indices.

    Args:
        window_shape: As in `flax.nnx.max_pool`.
        strides: As in `flax.nnx.max_pool`.
        padding: As in `flax.nnx.max_pool`.
        codec: `Packed(bits=...)`, or `Offload` of it. None calls Flax's function.

    Raises:
        TypeError: If `codec` is not a codec.
        ValueError: If `codec` does not store indices, or has too few bits for those of a window.

    Example:
        >>> import jax.numpy as jnp
        >>> MaxPool((2, 2), (2, 2), codec=Packed(bits=2))(jnp.ones((1, 4, 4, 1))).shape
        (1, 2, 2, 1)
    """

    kind = "max_pool"

    def __init__(
        self,
        window_shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
        padding: Padding = "VALID",
        codec: Codec | None = None,
    ) -> None:
        self.window_shape = window_shape
        self.strides = strides
        self.padding = padding
        super().__init__(codec=codec)

    def check_codec(self, codec: Codec | None) -> None:
        """Checks that the codec can store the index of every value of a window.

        Args:
            codec: The codec, or None.

        Raises:
            TypeError: If `codec` is not a codec.
            ValueError: If `codec` does not store indices, or has too few bits for those of a
                window.
        """
        super().check_codec(codec)
        size = math.prod(self.window_shape)
        packed = codec and inner_codec(codec)
        if isinstance(packed, Packed) and size > 2**packed.bits:
            raise ValueError(
                f"codec={codec}: a window of {size} values needs more bits for its index; put "
                'Rule(Packed(bits=8), op="max_pool") first, or Exact() over 256 values'
            )

    def saved_elements(self, args: tuple[Any, ...], result: Any) -> int:
        """Returns the number of elements that a call saves: one index per element of its result."""
        return count_elements(result)

    def __call__(self, x: Float[Array, "..."] | CodedArray) -> Float[Array, "..."] | CodedArray:
        """Returns the maximum of each window.

        Args:
            x: Array of shape (batch, spatial..., channels), or a `CodedArray` of one.

        Returns:
            The maxima; for a `CodedArray` with a code of the maxima.
        """
        if isinstance(x, CodedArray):
            unsigned = dataclasses.replace(cast(SignAware, inner_codec(x.codec)), signed=False)
            codec = placed_like(x.codec, unsigned)
            return encode_activation(value(self(x.value)), x.channel_scale, codec)
        if self.codec is None:
            return nnx.max_pool(x, *self.arguments)
        return ops.max_pool(x, *self.arguments, codec=self.codec)

    @property
    def arguments(self) -> tuple[tuple[int, ...], tuple[int, ...] | None, Padding]:
        """Arguments of `ops.max_pool` after the array: window shape, strides and padding."""
        return self.window_shape, self.strides, self.padding
