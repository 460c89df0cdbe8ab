"""Norm, addition and ReLU as one module, alone or after a convolution."""

import typing

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxcomp import ops
from jaxcomp.codecs import Codec, Exact, Offload, SignAware, noise
from jaxcomp.nn.activation import ReLU
from jaxcomp.nn.coded import Coded
from jaxcomp.nn.linear import Conv
from jaxcomp.nn.norm import BatchNorm

Features = Float[Array, "batch ..."] | ops.Activation


class Clipped(nnx.Variable[Array]):
    """State of a unit: the part of its elements of which some code is clipped, of the last call."""


class NormAct(Coded, nnx.Module):
    """`relu(norm(x) + residual)` that keeps one code for all of it.

    Args:
        norm: The norm, with scale and bias, over the last axis.
        relu: Whether there is a ReLU.
        codec: `SignAware(bits=...)`, with which the result in training is an `ops.Activation`; None
            leaves what is kept to the codecs of `norm` and `relu`.

    Example:
        >>> import jax
        >>> module = NormAct(BatchNorm(8, rngs=nnx.Rngs(0)), codec=SignAware(bits=4))
        >>> type(module(jax.numpy.ones((2, 4, 4, 8)))).__name__
        'Activation'
    """

    kind = "norm_act"
    covers = ("norm", "relu")
    clipped: Clipped | None = None

    def __init__(
        self, norm: BatchNorm, *, relu: bool = True, codec: SignAware | Offload | None = None
    ) -> None:
        self.norm = norm
        self.relu = ReLU() if relu else None
        super().__init__(codec=codec)

    def check_codec(self, codec: Codec | None) -> None:
        """Raises an error unless the codec is `SignAware` or `Offload` of it, for this norm."""
        super().check_codec(codec)
        norm = self.norm
        if (
            codec is not None
            and not isinstance(codec, Exact)
            and not (norm.scale and norm.bias and norm.axis == -1)
        ):
            raise ValueError(f"codec={codec}: expected a norm with scale and bias, and axis=-1")

    def __call__(self, x: Float[Array, "batch ..."], residual: Features | None = None) -> Features:
        """Returns the result, in training and with a codec as an `ops.Activation`."""
        norm = self.norm
        if self.codec is None or norm.use_running_average:
            y = norm(x)
            y = y if residual is None else y + ops.value(residual)
            return y if self.relu is None else self.relu(y)
        assert norm.scale and norm.bias  # by check_codec
        scale, bias = norm.scale[...], norm.bias[...]
        seed = noise.fingerprint(scale, bias)
        variables = x, norm.mean[...], norm.var[...], scale, bias
        x, _, _, scale, bias = norm.promote_dtype(variables, dtype=norm.dtype)
        coded, mean, var = ops.norm_act(
            x,
            scale,
            bias,
            residual,
            relu=self.relu is not None,
            epsilon=norm.epsilon,
            use_fast_variance=norm.use_fast_variance,
            axis_name=norm.axis_name,
            axis_index_groups=norm.axis_index_groups,
            codec=typing.cast(SignAware | Offload, self.codec),
            seed=seed,
        )
        norm.update(mean, var)
        if self.clipped is not None:
            share = ops.clipped(x, scale, bias, mean, var, coded, epsilon=norm.epsilon)
            self.clipped[...] = jax.lax.stop_gradient(share)
        return coded


class ConvNormAct(NormAct):
    """`relu(norm(conv(x)) + residual)` that keeps one code for norm, ReLU and what reads them.

    Args:
        conv: The convolution; of an `ops.Activation` it keeps the code that came with it.
        norm: As `NormAct`.
        relu: As `NormAct`.
        codec: As `NormAct`.

    Example:
        >>> import jax
        >>> rngs = nnx.Rngs(0)
        >>> unit = ConvNormAct(Conv(3, 8, (3, 3), rngs=rngs), BatchNorm(8, rngs=rngs))
        >>> unit(jax.numpy.ones((2, 4, 4, 3))).shape
        (2, 4, 4, 8)
    """

    def __init__(
        self,
        conv: Conv,
        norm: BatchNorm,
        *,
        relu: bool = True,
        codec: SignAware | Offload | None = None,
    ) -> None:
        self.conv = conv
        super().__init__(norm, relu=relu, codec=codec)

    def __call__(self, x: Features, residual: Features | None = None) -> Features:
        """Returns the result, in training and with a codec as an `ops.Activation`."""
        return super().__call__(self.conv(x), residual)
