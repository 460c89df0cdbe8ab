"""The one place that pins residuals against XLA.

A residual that is declared small is not yet stored small: XLA puts the encoding off until just
before the backward pass and keeps the full array, or decodes early. Two barriers stop both: `keep`
in the forward rule of a `jax.custom_vjp`, `release` or `wait_for` in its backward rule. An array
that passes a barrier is written to memory, so each ties an array that is written there anyway.
"""

import typing

import jax
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


def release(residual: C, cotangent: T) -> tuple[C, T]:
    """Ties a residual to the arriving cotangent: it is decoded after the cotangent is there.

    For a decoded array or a cotangent that is written to memory, such as an operand of a product.

    Args:
        residual: What `keep` returned.
        cotangent: The arriving cotangent, any pytree.

    Returns:
        `residual` and `cotangent`, to be used in place of the arguments.
    """
    return lax.optimization_barrier((residual, cotangent))


def wait_for(residual: C, cotangent: Array) -> tuple[C, Array]:
    """Ties a residual to one element per sample of the cotangent, which itself stays untied.

    For elementwise backward rules: the cotangent can be made inside them, and is not written. XLA
    for CPU drops a barrier whose other results are unused; there it is `release`.

    Args:
        residual: What `keep` returned.
        cotangent: The arriving cotangent; axis 0 is the batch.

    Returns:
        `residual` and `cotangent`, to be used in place of the arguments.
    """
    return lax.platform_dependent(residual, cotangent, cpu=release, default=_wait)


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


def _wait(residual: C, cotangent: Array) -> tuple[C, Array]:
    first = [slice(None), *(slice(1) for _ in cotangent.shape[1:])][: cotangent.ndim]
    residual, _ = lax.optimization_barrier((residual, cotangent[tuple(first)]))
    return residual, cotangent
