"""The one place that pins residuals against XLA.

A residual that is declared small is not yet stored small: XLA puts the encoding off until just
before the backward pass and keeps the full array, or decodes early. Two barriers stop both.
"""

import typing

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxcomp.codecs import Codec

PREFIX = "jaxcomp"

T = typing.TypeVar("T")
C = typing.TypeVar("C")


def keep(out: T, residual: C, codec: Codec) -> tuple[T, C]:
    """Ties a forward result to its residual: the residual is made before the result is used.

    Every array of the residual gets the name `jaxcomp/<codec>`, by which a `jax.checkpoint` policy
    may save it. Call it last in the forward rule of a `jax.custom_vjp`.

    Args:
        out: The exact result of the operation, any pytree.
        residual: What waits for the backward pass, any pytree.
        codec: What the residual is stored by; gives the name.

    Returns:
        `out` and `residual`, to be used in place of the arguments.
    """
    out, residual = lax.optimization_barrier((out, residual))
    name = f"{PREFIX}/{codec.name}"
    return out, jax.tree.map(lambda leaf: checkpoint_name(leaf, name), residual)


def release(residual: C, cotangent: T) -> tuple[C, T]:
    """Ties a residual to the arriving cotangent: it is decoded after the cotangent is there.

    Call it first in the backward rule of a `jax.custom_vjp`.

    Args:
        residual: What `keep` returned.
        cotangent: The cotangent of `out`, any pytree.

    Returns:
        `residual` and `cotangent`, to be used in place of the arguments.
    """
    return lax.optimization_barrier((residual, cotangent))
