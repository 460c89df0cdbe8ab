"""Activation and pooling functions as modules, so that a rule can name them by their path."""

from collections.abc import Sequence

from flax import nnx
from jaxtyping import Array, Float

from jaxcomp import ops
from jaxcomp.codecs import Packed


class ReLU(nnx.Module):
    """`flax.nnx.relu` that keeps a packed mask.

    Args:
        codec: `Packed(bits=1)` for the packed mask; None leaves the function as it is in Flax.

    Example:
        >>> import jax.numpy as jnp
        >>> ReLU(codec=Packed(bits=1))(jnp.array([-1.0, 2.0])).tolist()
        [0.0, 2.0]
    """

    kind = "relu"

    def __init__(self, codec: Packed | None = None) -> None:
        self.codec = codec

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Returns max(x, 0)."""
        return nnx.relu(x) if self.codec is None else ops.relu(x)


class MaxPool(nnx.Module):
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
        padding: str | Sequence[tuple[int, int]] = "VALID",
        codec: Packed | None = None,
    ) -> None:
        self.window_shape = window_shape
        self.strides = strides
        self.padding = padding
        self.codec = codec

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Returns the maxima of the windows of `x`."""
        args = self.window_shape, self.strides, self.padding
        if self.codec is None:
            return nnx.max_pool(x, *args)
        return ops.max_pool(x, *args, codec=self.codec)
