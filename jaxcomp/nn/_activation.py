"""Activation and pooling functions as modules, so that a rule can name them by their path."""

import dataclasses
import math
import typing

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxcomp import ops
from jaxcomp.codecs import Codec, Packed, SignAware
from jaxcomp.codecs._offload import inner_codec, placed_like
from jaxcomp.nn._coded import Coded, count_elements
from jaxcomp.ops import CodedArray, Padding, encode_activation, value


class ReLU(Coded, nnx.Module):
    """`flax.nnx.relu` that keeps a packed mask.

    Args:
        codec: `Packed(bits=1)` for the packed mask; None leaves the function as it is in Flax.

    Example:
        >>> import jax.numpy as jnp
        >>> ReLU(codec=Packed(bits=1))(jnp.array([-1.0, 2.0])).tolist()
        [0.0, 2.0]
    """

    kind = "relu"

    def __init__(self, codec: Codec | None = None) -> None:
        super().__init__(codec=codec)

    def check_codec(self, codec: Codec | None) -> None:
        """Raises an error unless the codec is a mask's: `Packed(bits=1)`, `Exact()` or None."""
        super().check_codec(codec)
        _check_mask(codec)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Returns max(x, 0)."""
        return nnx.relu(x) if self.codec is None else ops.relu(x, codec=self.codec)


class GELU(Coded, nnx.Module):
    """`flax.nnx.gelu` that keeps its derivative as `codec` stores it.

    It has no parameters to draw its noise by: a value that comes back at the same place of the same
    shape, such as a padding's zero, is rounded the same way.

    Args:
        approximate: Whether to use the tanh form, as `flax.nnx.gelu`.
        codec: How the derivative is stored; None leaves the function as it is in Flax.

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
        """Returns x times the normal distribution's value at x."""
        return ops.gelu(x, self.approximate, codec=self.codec)


class SiLU(Coded, nnx.Module):
    """`flax.nnx.silu` that keeps its derivative as `codec` stores it; its noise is as `GELU`'s.

    Args:
        codec: How the derivative is stored; None leaves the function as it is in Flax.

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
        return ops.silu(x, codec=self.codec)


class Dropout(Coded, nnx.Dropout):
    """`flax.nnx.Dropout` that keeps a packed mask.

    Constructor, random numbers and results are those of `flax.nnx.Dropout`.

    Args:
        *args: As `flax.nnx.Dropout`.
        codec: `Packed(bits=1)` for the packed mask; None leaves the layer as it is in Flax.
        **kwargs: As `flax.nnx.Dropout`.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = Dropout(0.5, codec=Packed(bits=1), rngs=nnx.Rngs(0))
        >>> float(layer(jnp.ones(100)).max())
        2.0
    """

    kind = "dropout"

    def check_codec(self, codec: Codec | None) -> None:
        """Raises an error unless the codec is a mask's: `Packed(bits=1)`, `Exact()` or None."""
        super().check_codec(codec)
        _check_mask(codec)

    def __call__(
        self,
        inputs: Float[Array, "..."],
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> Float[Array, "..."]:
        """Drops elements of `inputs`; arguments as in `flax.nnx.Dropout`."""
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
    """`flax.nnx.max_pool` that keeps packed indices.

    Args:
        window_shape: As `flax.nnx.max_pool`.
        strides: As `flax.nnx.max_pool`.
        padding: As `flax.nnx.max_pool`.
        codec: `Packed(bits=...)` for packed indices; None leaves the function as it is in Flax.

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
        """Raises an error unless the codec can hold the index of every value of a window."""
        super().check_codec(codec)
        size = math.prod(self.window_shape)
        packed = codec and inner_codec(codec)
        if isinstance(packed, Packed) and size > 2**packed.bits:
            raise ValueError(
                f"codec={codec}: a window of {size} values needs more bits for its index; put "
                'Rule(Packed(bits=8), op="max_pool") first, or Exact() over 256 values'
            )

    def saved_elements(self, args: tuple[typing.Any, ...], result: typing.Any) -> int:
        """Elements of what a call saves: an index for each element of its result."""
        return count_elements(result)

    def __call__(self, x: Float[Array, "..."] | CodedArray) -> Float[Array, "..."] | CodedArray:
        """Returns the maxima of the windows of `x`; of a `CodedArray` they have a code, too."""
        if isinstance(x, CodedArray):
            unsigned = dataclasses.replace(
                typing.cast(SignAware, inner_codec(x.codec)), signed=False
            )
            codec = placed_like(x.codec, unsigned)
            return encode_activation(value(self(x.value)), x.channel_scale, codec)
        if self.codec is None:
            return nnx.max_pool(x, *self.arguments)
        return ops.max_pool(x, *self.arguments, codec=self.codec)

    @property
    def arguments(self) -> tuple[tuple[int, ...], tuple[int, ...] | None, Padding]:
        """What `ops.max_pool` takes after the array."""
        return self.window_shape, self.strides, self.padding
