"""Norm, addition and ReLU as one layer, alone or after a convolution."""

from typing import Any, cast

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxcomp import ops
from jaxcomp.codecs import Codec, Exact, Offload, SignAware
from jaxcomp.nn._activation import MaxPool, ReLU
from jaxcomp.nn._coded import Coded, count_elements
from jaxcomp.nn._linear import Conv
from jaxcomp.nn._norm import BatchNorm

Features = Float[Array, "batch ..."] | ops.CodedArray


class Clipped(nnx.Variable[Array]):
    """Variable of a `NormAct`: the fraction of clipped elements in its last call."""


class NormAct(Coded, nnx.Module):
    """Computes `relu(norm(x) + residual)` and saves one code for all of it (`ops.norm_act`).

    Args:
        norm: Batch norm over the last axis, with scale and bias.
        relu: Whether to apply a ReLU.
        residual_norm: Batch norm with the same options, applied to the skip connection before the
            addition; or None.
        pool: Max pool after the ReLU, for calls without a skip connection; or None.
        codec: `SignAware`, or `Offload` of it. In training the result is then an `ops.CodedArray`,
            and the codecs of `norm`, `relu`, `residual_norm` and `pool` are unused. With None, or
            if `norm` uses running averages, these modules run one by one with their own codecs.

    Raises:
        TypeError: If `residual_norm` or `pool` is not a module of `jaxcomp.nn` of its kind.
        ValueError: If `residual_norm` or `pool` is given without a ReLU, if both are given, or if
            the codec does not fit the norms.

    Example:
        >>> import jax
        >>> module = NormAct(BatchNorm(8, rngs=nnx.Rngs(0)), codec=SignAware(bits=4))
        >>> type(module(jax.numpy.ones((2, 4, 4, 8)))).__name__
        'CodedArray'
    """

    kind = "norm_act"
    covers = ("norm", "relu", "residual_norm", "pool")
    clipped: Clipped | None = None

    def __init__(
        self,
        norm: BatchNorm,
        *,
        relu: bool = True,
        residual_norm: BatchNorm | None = None,
        pool: MaxPool | None = None,
        codec: SignAware | Offload | None = None,
    ) -> None:
        self.norm = norm
        self.relu = ReLU() if relu else None
        for name, given, kind in (
            ("residual_norm", residual_norm, BatchNorm),
            ("pool", pool, MaxPool),
        ):
            of_type = f"{name} of type {type(given).__name__}"
            if given is not None and not isinstance(given, kind):
                raise TypeError(f"{of_type}: expected a jaxcomp.nn.{kind.__name__}, or None")
            if given is not None and not relu:
                raise ValueError(f"{of_type}: expected None with relu=False")
        if pool is not None and residual_norm is not None:
            raise ValueError("pool: expected None with a residual_norm")
        self.residual_norm = residual_norm
        self.pool = pool
        super().__init__(codec=codec)

    def check_codec(self, codec: Codec | None) -> None:
        """Checks that the codec is `SignAware`, or `Offload` of it, and fits the norms.

        Args:
            codec: The codec, or None.

        Raises:
            TypeError: If `codec` is not a codec.
            ValueError: If the codec is for other operations; if a norm has no scale or bias, or
                another axis than -1; or if the options of both norms differ.
        """
        super().check_codec(codec)
        if codec is None or isinstance(codec, Exact):
            return
        norms = self.norm, self.residual_norm or self.norm
        if not all(norm.scale and norm.bias and norm.axis == -1 for norm in norms):
            raise ValueError(f"codec={codec}: expected a norm with scale and bias, and axis=-1")
        options, of_residual = (
            {"num_features": norm.num_features} | _options(norm) for norm in norms
        )
        if of_residual != options:
            raise ValueError(f"residual_norm with {of_residual}: expected {options}, as norm")

    def saved_elements(self, args: tuple[Any, ...], result: Any) -> int:
        """Returns the number of elements that a call saves.

        They are those of the result, of the normalised skip connection, and of the input of a pool.
        """
        count = count_elements(result) * (1 if self.residual_norm is None else 2)
        return count + (0 if self.pool is None else count_elements(args[:1]))

    def __call__(self, x: Float[Array, "batch ..."], residual: Features | None = None) -> Features:
        """Returns the result: an `ops.CodedArray` in training with a codec, else an array.

        Args:
            x: Input of the norm, (batch, ..., features).
            residual: Skip connection that is added before the ReLU.

        Raises:
            ValueError: If `residual` is None and there is a `residual_norm`.
        """
        norm, residual_norm = self.norm, self.residual_norm
        if residual_norm is not None and residual is None:
            raise ValueError("residual=None: expected an array, which residual_norm is for")
        if self.codec is None or norm.use_running_average:
            return self._separately(x, residual)
        norms, normed, of_residual = [norm], None, None
        if residual is not None and residual_norm is not None:
            if residual_norm.use_running_average:
                residual = residual_norm(ops.value(residual))
            else:
                normed, of_residual = _promoted(residual_norm, ops.value(residual))
                norms, residual = [norm, residual_norm], normed
        x, (scale, bias) = _promoted(norm, x)
        coded, means, variances = ops.norm_act(
            x,
            scale,
            bias,
            residual,
            residual_norm=of_residual,
            relu=self.relu is not None,
            pool=None if self.pool is None else self.pool.arguments,
            codec=cast(SignAware | Offload, self.codec),
            **_options(norm),
        )
        for one, mean, var in zip(norms, means, variances, strict=True):
            one.update(mean, var)
        if self.clipped is not None:
            share = ops.clipped(
                x, scale, bias, means, variances, coded, normed, epsilon=norm.epsilon
            )
            self.clipped.set_value(jax.lax.stop_gradient(share))
        return coded

    def _separately(self, x: Array, residual: Features | None) -> Features:
        """Runs the modules one by one."""
        y = self.norm(x)
        if residual is not None:
            if self.residual_norm is not None:
                residual = self.residual_norm(ops.value(residual))
            y = y + ops.value(residual)
        y = y if self.relu is None else self.relu(y)
        return y if self.pool is None else self.pool(y)


def _affine(norm: BatchNorm) -> tuple[Array, Array]:
    """Returns scale and bias, which `check_codec` requires.

    Raises:
        ValueError: If one was taken from the norm later.
    """
    if not norm.scale or not norm.bias:
        raise ValueError(f"norm with scale={norm.scale}, bias={norm.bias}: expected both")
    return norm.scale[...], norm.bias[...]


def _promoted(norm: BatchNorm, x: Array) -> tuple[Array, tuple[Array, Array]]:
    """Returns an input, and scale and bias, in the dtype of the norm's computation."""
    variables = x, norm.mean[...], norm.var[...], *_affine(norm)
    x, _, _, scale, bias = norm.promote_dtype(variables, dtype=norm.dtype)
    return x, (scale, bias)


def _options(norm: BatchNorm) -> dict[str, Any]:
    """Returns the options of a norm as arguments of `ops.norm_act`."""
    names = "epsilon", "use_fast_variance", "axis_name", "axis_index_groups"
    return {name: getattr(norm, name) for name in names}


class ConvNormAct(NormAct):
    """A convolution followed by a `NormAct`.

    Args:
        conv: The convolution. For an `ops.CodedArray` it saves that array's code.
        norm: As in `NormAct`.
        relu: As in `NormAct`.
        residual_norm: As in `NormAct`.
        codec: As in `NormAct`.

    Raises:
        TypeError: As in `NormAct`.
        ValueError: As in `NormAct`.

    Example:
        >>> import jax
        >>> rngs = nnx.Rngs(0)
        >>> layer = ConvNormAct(Conv(3, 8, (3, 3), rngs=rngs), BatchNorm(8, rngs=rngs))
        >>> layer(jax.numpy.ones((2, 4, 4, 3))).shape
        (2, 4, 4, 8)
    """

    def __init__(
        self,
        conv: Conv,
        norm: BatchNorm,
        *,
        relu: bool = True,
        residual_norm: BatchNorm | None = None,
        codec: SignAware | Offload | None = None,
    ) -> None:
        self.conv = conv
        super().__init__(norm, relu=relu, residual_norm=residual_norm, codec=codec)

    def __call__(self, x: Features, residual: Features | None = None) -> Features:
        """Returns the result: an `ops.CodedArray` in training with a codec, else an array.

        Args:
            x: Input of the convolution.
            residual: As in `NormAct`.

        Raises:
            ValueError: As in `NormAct`.
        """
        return super().__call__(self.conv(x), residual)
