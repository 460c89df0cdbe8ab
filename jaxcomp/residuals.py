"""The one place that pins residuals against XLA.

A residual that is declared small is not yet stored small: XLA puts the encoding off until just
before the backward pass and keeps the full array, or decodes early, or uses the decoded array late.
Barriers stop all three: `keep` in the forward rule of a `jax.custom_vjp`; `tie` or `decode_after`
in its backward rule. An array that passes a barrier is written to memory, so each ties an array
that is written there anyway. XLA drops what nobody uses from a barrier, so what is tied is also
used.
"""

import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from jaxcomp.codecs import Codec, Exact

T = typing.TypeVar("T")
C = typing.TypeVar("C")


def keep(value: T, residual: C, codec: Codec) -> tuple[T, C]:
    """Ties a forward value to its residual: the residual is made before the value is used.

    Every array of the residual gets the name `jaxcomp/<codec>`, by which a `jax.checkpoint` policy
    may save it.

    A gradient of the gradient would need the derivative of the codec, which has none to speak of:
    it is refused, except for `Exact`.

    Args:
        value: Input or result of the operation, whichever is written to memory anyway; any pytree.
        residual: What waits for the backward pass, any pytree.
        codec: What the residual is stored by; gives the name.

    Returns:
        `value` and `residual`, to be used in place of the arguments.

    Raises:
        NotImplementedError: When the residual is differentiated.
    """
    if not isinstance(codec, Exact):
        residual = _undifferentiable(residual)
    value, residual = lax.optimization_barrier((value, residual))
    return value, name(residual, codec)


def name(residual: C, codec: Codec) -> C:
    """Gives every array of a residual, any pytree, the name that `keep` gives."""
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, codec.stored_name()), residual)


@jax.custom_jvp
def _undifferentiable(residual: C) -> C:
    return residual


@_undifferentiable.defjvp
def _refuse(primals: tuple[C], tangents: tuple[C]) -> typing.NoReturn:
    raise NotImplementedError(
        "second derivatives through a compressed residual are not defined; use codec=Exact()"
    )


def tie(one: C, other: T) -> tuple[C, T]:
    """Ties two values of a backward rule: neither is used before both are there.

    A residual tied to the arriving cotangent is decoded no earlier than that. A weight's gradient
    tied to the cotangent that it was made of is made before the cotangent is used again; XLA may
    otherwise put it off to the end of the backward pass, and keep the decoded residual until then.

    Args:
        one: Any pytree, such as what `keep` returned or a weight's gradient.
        other: Any pytree of arrays that are written to memory anyway, such as a cotangent that is
            an operand of a product.

    Returns:
        Both, to be used in place of the arguments.
    """
    return lax.optimization_barrier((one, other))


def decode_after(cotangent: Array, residual: C, decode: Callable[[C], T]) -> T:
    """Decodes a residual after one element per sample of the cotangent is there.

    For elementwise backward rules: decoding and the cotangent's making can then be parts of one
    kernel, and neither is written to memory, as `tie` would have it.

    Args:
        cotangent: The arriving cotangent; axis 0 is the batch.
        residual: What `keep` returned.
        decode: Makes an array of the cotangent's rank of it, or several.

    Returns:
        What `decode` returns.
    """
    first = cotangent[(slice(None), *(slice(1),) * (cotangent.ndim - 1))[: cotangent.ndim]]
    residual, first, never = lax.optimization_barrier((residual, first, jnp.bool(False)))
    # A use of `first`, without which XLA drops it from the barrier.
    return jax.tree.map(
        lambda decoded: jnp.where(never, first.astype(decoded.dtype), decoded), decode(residual)
    )


def compiler_options() -> dict[str, str]:
    """What `jax.jit(step, compiler_options=...)` needs for the barriers to hold on this device.

    XLA for CPU of JAX before 0.12 drops every optimisation barrier before it fuses, those of
    `jax.checkpoint` too, and then keeps the full arrays; nothing else needs an option.

    Returns:
        Options of the XLA compiler; none where none are needed.

    Example:
        >>> step = jax.jit(lambda x: 2 * x, compiler_options=compiler_options())
    """
    if jax.default_backend() == "cpu" and jax.__version_info__ < (0, 12):
        return {"xla_disable_hlo_passes": "cse_barrier_expander"}
    return {}
