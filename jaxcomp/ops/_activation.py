"""Activation functions and dropout that save a packed mask or a quantized derivative."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, UInt32

from jaxcomp._core import barriers
from jaxcomp._core.explicit import over_automatic_axes
from jaxcomp._core.shard_map import match_varying
from jaxcomp.codecs import Codec, Encoded, Packed, Quantize
from jaxcomp.codecs._codec import Seed
from jaxcomp.codecs._offload import inner_codec

MASK = Packed(bits=1)


def relu(x: Float[Array, "*shape"], *, codec: Codec = MASK) -> Float[Array, "*shape"]:
    """Computes `jax.nn.relu` and saves one bit per element for the backward pass.

    Result and gradient are bit-identical to those of `jax.nn.relu`.

    Args:
        x: Floating-point array of any shape.
        codec: Codec of the mask: `Packed(bits=1)`, or `Offload` of it.

    Returns:
        `max(x, 0)`, in the dtype of `x`.

    Example:
        >>> jax.vmap(jax.grad(relu))(jnp.array([-1.0, 0.0, 2.0])).tolist()
        [0.0, 0.0, 1.0]
    """

    @jax.custom_vjp
    def op(x: Array) -> Array:
        return jax.nn.relu(x)

    def forward(x: Array) -> tuple[Array, Encoded]:
        out = jax.nn.relu(x)
        return barriers.save_residual(out, codec.encode(out > 0), codec)

    def backward(mask: Encoded, cotangent: Array) -> tuple[Array]:
        mask, cotangent = barriers.barrier_together(mask, cotangent)
        return (jnp.where(codec.decode(mask), cotangent, jnp.zeros_like(cotangent)),)

    op.defvjp(forward, backward)
    return op(x)


def gelu(
    x: Float[Array, "*shape"],
    approximate: bool = True,
    *,
    codec: Codec | None = None,
    seed: Seed = None,
) -> Float[Array, "*shape"]:
    """Computes `jax.nn.gelu` and saves its encoded derivative.

    The result is bit-identical to `jax.nn.gelu`. The gradient is the cotangent times the decoded
    derivative, so it is unbiased if the codec is. `Quantize` places its levels between the known
    bounds of the derivative, so no pass computes a range, and the derivative is encoded in the pass
    that computes the result. A NaN in `x` appears in the result, not in the gradient.

    Source: FewBit (Novikov et al., ICML 2023, arXiv:2202.00441). FewBit rounds derivatives to
    nearest.

    Args:
        x: float32, bfloat16 or float16 array; axis 0 is the batch.
        approximate: Whether to use the tanh approximation, as in `jax.nn.gelu`.
        codec: Codec of the derivative. None calls `jax.nn.gelu`.
        seed: Integer scalar that selects the rounding noise of the codec.

    Returns:
        The result in the dtype of `x`.

    Raises:
        TypeError: If the codec cannot store the dtype of `x`.
        ValueError: If the codec cannot store the shape of `x`.

    Example:
        >>> from jaxcomp import Quantize
        >>> f = jax.grad(lambda x: gelu(x, codec=Quantize(bits=8)).sum())
        >>> bool(abs(f(jnp.zeros((1, 4))) - 0.5).max() < 0.01)
        True
    """
    stock = functools.partial(jax.nn.gelu, approximate=approximate)
    return _by_derivative(stock, (-0.13, 1.13), x, codec, seed)


def silu(
    x: Float[Array, "*shape"], *, codec: Codec | None = None, seed: Seed = None
) -> Float[Array, "*shape"]:
    """Computes `jax.nn.silu` and saves its encoded derivative.

    The result is bit-identical to `jax.nn.silu`. Gradient, source and treatment of NaN are as in
    `gelu`.

    Args:
        x: float32, bfloat16 or float16 array; axis 0 is the batch.
        codec: Codec of the derivative. None calls `jax.nn.silu`.
        seed: Integer scalar that selects the rounding noise of the codec.

    Returns:
        The result in the dtype of `x`.

    Raises:
        TypeError: If the codec cannot store the dtype of `x`.
        ValueError: If the codec cannot store the shape of `x`.

    Example:
        >>> silu(jnp.array([0.0])).tolist()
        [0.0]
    """
    return _by_derivative(jax.nn.silu, (-0.11, 1.11), x, codec, seed)


def _by_derivative(
    stock: Callable[[Array], Array],
    bounds: tuple[float, float],
    x: Array,
    codec: Codec | None,
    seed: Seed,
) -> Array:
    """Applies an elementwise function and saves its derivative, which lies within `bounds`."""
    if codec is None:
        return stock(x)
    codec.check(x.shape, x.dtype)
    x, seed = match_varying((x, seed))

    @jax.custom_vjp
    def op(x: Array, seed: Seed) -> Array:
        return stock(x)

    def forward(x: Array, seed: Seed) -> tuple[Array, Encoded]:
        # In float32 also for a bfloat16 `x`: the derivative is exact, and XLA does not write a
        # subexpression that it shares with the result, such as a tanh, to memory.
        wide = x.astype(jnp.float32)
        derivative = jax.jvp(stock, (wide,), (jnp.ones_like(wide),))[1].astype(x.dtype)
        quantize = inner_codec(codec)
        if isinstance(quantize, Quantize):
            code = quantize.encode_within(derivative, *bounds, seed)
        else:
            code = codec.encode(derivative, seed)
        return barriers.save_residual(stock(x), code, codec)

    def backward(code: Encoded, cotangent: Array) -> tuple[Array, None]:
        derivative = barriers.decode_after(cotangent, code, codec.decode)
        return cotangent * derivative, None

    op.defvjp(forward, backward)
    return op(x, seed)


def dropout(
    x: Float[Array, "*shape"],
    key: Key[Array, ""] | UInt32[Array, "2"],
    rate: float,
    broadcast_dims: Sequence[int] = (),
    *,
    codec: Codec = MASK,
) -> Float[Array, "*shape"]:
    """Applies dropout as `flax.nnx.Dropout` and saves one bit for each random number.

    Result and gradient are bit-identical to those of `flax.nnx.Dropout` in training.

    Args:
        x: Floating-point array of any shape.
        key: PRNG key of the mask.
        rate: Probability that an element is dropped, at least 0 and below 1.
        broadcast_dims: Axes along which the mask is constant.
        codec: Codec of the mask: `Packed(bits=1)`, or `Offload` of it.

    Returns:
        Array of the shape and dtype of `x`: zero where an element is dropped, `x / (1 - rate)`
        elsewhere.

    Raises:
        ValueError: If `rate` or an axis of `broadcast_dims` is out of range.

    Example:
        >>> float(dropout(jnp.ones(1000), jax.random.key(0), 0.5).max())
        2.0
    """
    if not 0 <= rate < 1:
        raise ValueError(f"rate={rate}: expected at least 0 and below 1")
    if not all(-x.ndim <= axis < x.ndim for axis in broadcast_dims):
        raise ValueError(f"broadcast_dims={broadcast_dims}: expected axes of x of shape {x.shape}")
    x, key = match_varying((x, key))
    dims = {axis % x.ndim for axis in broadcast_dims}
    shape = tuple(1 if axis in dims else n for axis, n in enumerate(x.shape))

    def masked(x: Array, kept: Array) -> Array:
        return jnp.where(kept, x / (1.0 - rate), jnp.zeros_like(x))

    def draw(key: Array) -> Array:
        return jax.random.bernoulli(key, p=1.0 - rate, shape=shape)

    @jax.custom_vjp
    def op(x: Array, key: Array) -> Array:
        return masked(x, draw(key))

    def forward(x: Array, key: Array) -> tuple[Array, Encoded]:
        # Without a barrier, XLA may draw the numbers of all layers before the first layer.
        key, x = barriers.barrier_together(key, x)
        kept = draw(key)
        return barriers.save_residual(masked(x, kept), codec.encode(kept), codec)

    def backward(mask: Encoded, cotangent: Array) -> tuple[Array, None]:
        mask, cotangent = barriers.barrier_together(mask, cotangent)
        return masked(cotangent, codec.decode(mask)), None

    op.defvjp(forward, backward)
    dropped: Array = over_automatic_axes(op, (x, key), like=x)
    return dropped
