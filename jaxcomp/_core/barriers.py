"""Optimisation barriers that make XLA keep the code of a saved residual instead of the residual.

A residual that is declared in 2 bits is not yet kept in 2 bits. XLA may delay the encoding until
just before the backward pass and keep the full array, decode early, or use the decoded array late.
Barriers prevent all three: `save_residual` in the forward rule of a `jax.custom_vjp`,
`barrier_together` or `decode_after` in its backward rule.

An array that passes a barrier is written to memory, so each barrier takes an array that is written
there anyway. XLA removes an unused operand from a barrier, so each operand is also used.
"""

import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from jaxcomp._core import platforms
from jaxcomp._core.shard_map import match_varying

T = typing.TypeVar("T")
C = typing.TypeVar("C")


@typing.runtime_checkable
class SavedBy(typing.Protocol):
    """What barriers ask of a codec; `jaxcomp.codecs.Codec` says what each means."""

    is_exact: typing.ClassVar[bool]
    on_host: typing.ClassVar[bool]

    @property
    def fuses_decode_on_tpu(self) -> bool: ...

    def stored_name(self) -> str: ...


def save_residual(value: T, residual: C, codec: SavedBy) -> tuple[T, C]:
    """Saves a residual for the backward pass: it is computed before the value is used.

    Every array of the residual gets the name `jaxcomp/<codec>`, by which a `jax.checkpoint` policy
    may save it.

    A gradient of the gradient would need the derivative of the codec, which has none to speak of:
    it is refused, except for `Exact`.

    The code of `Offload` is moved to the host's pinned memory. `barrier_together` and
    `decode_after` bring it back.

    Args:
        value: Input or result of the operation, whichever is written to memory anyway; any pytree.
        residual: What waits for the backward pass, any pytree.
        codec: What the residual is stored by; gives the name.

    Returns:
        `value` and `residual`, to be used in place of the arguments.

    Raises:
        NotImplementedError: When the residual is differentiated.
    """
    if not codec.is_exact:
        residual = undifferentiable(residual)
    value, residual = lax.optimization_barrier((value, residual))
    residual = name_residual(residual, codec)
    return _to_host(value, residual) if codec.on_host else (value, residual)


def materialize(value: Array) -> Array:
    """An array that is in memory before it is encoded, as it will be anyway.

    A codec reads it more than once, for ranges and then for codes. XLA may otherwise make it anew
    for each, or write what it is made of to memory as well.
    """
    return lax.optimization_barrier(value)


def name_residual(residual: C, codec: SavedBy) -> C:
    """Gives every array of a residual, any pytree, the name that `save_residual` gives."""
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, codec.stored_name()), residual)


def await_host_copy(value: Array, residual: typing.Any) -> Array:
    """An array that on a GPU is not used before residuals that `Offload` made are on the host.

    XLA for GPUs puts a copy to the host off until somebody waits for it, and keeps the original
    until then. TPUs copy at once.

    Args:
        value: What the forward pass still needs; small, or the operand of elementwise operations.
        residual: What `save_residual` returned, any pytree.
    """

    def waiting(value: Array, copies: list[Array]) -> Array:
        for copy in copies:
            piece = jax.device_put(copy[(slice(1),) * copy.ndim], jax.memory.Space.Device)
            piece, never = lax.optimization_barrier((piece.reshape(()), jnp.bool(False)))
            value = jnp.where(never, piece.astype(value.dtype), value)
        return value

    value, copies = match_varying((value, jax.tree.leaves(residual)))
    return platforms.hold_until_copied_on_gpu((value, copies), waiting)


def _to_host(value: T, residual: C) -> tuple[T, C]:
    """Moves a residual to pinned host memory; the smallest array of the value waits for it."""
    residual = jax.tree.map(lambda leaf: jax.device_put(leaf, jax.memory.Space.Host), residual)
    leaves, tree = jax.tree.flatten(value)
    smallest = min(range(len(leaves)), key=lambda i: leaves[i].size)
    leaves[smallest] = await_host_copy(leaves[smallest], residual)
    return jax.tree.unflatten(tree, leaves), residual


def on_device(residual: C) -> C:
    """A residual, any pytree, with what waits in the host's memory brought back."""

    def move(leaf: Array) -> Array:
        on_host = jax.typeof(leaf).memory_space == jax.memory.Space.Host
        return jax.device_put(leaf, jax.memory.Space.Device) if on_host else leaf

    return jax.tree.map(move, residual)


@jax.custom_jvp
def undifferentiable(residual: C) -> C:
    """The same arrays; their derivatives are an error, as `save_residual` says."""
    return residual


@undifferentiable.defjvp
def _refuse(primals: tuple[C], tangents: tuple[C]) -> typing.NoReturn:
    raise NotImplementedError(
        "second derivatives through a compressed residual are not defined; use codec=Exact()"
    )


def barrier_together(one: C, other: T, codec: SavedBy | None = None) -> tuple[C, T]:
    """Ties two values of a backward rule: neither is used before both are there.

    A residual tied to the arriving cotangent is decoded no earlier than that. A weight's gradient
    tied to the cotangent that it was made of is made before the cotangent is used again; XLA may
    otherwise put it off to the end of the backward pass, and keep the decoded residual until then.

    Args:
        one: Any pytree, such as what `save_residual` returned or a weight's gradient.
        other: Any pytree of arrays that are written to memory anyway, such as a cotangent that is
            an operand of a product.
        codec: What the residual is stored by. If it is one with `fuses_decode_on_tpu`, nothing
            is tied on a TPU.

    Returns:
        Both, to be used in place of the arguments.
    """
    one, other = _held((one, other), codec)
    return on_device(one), other


def decode_after(
    cotangent: Array, residual: C, decode: Callable[[C], T], codec: SavedBy | None = None
) -> T:
    """Decodes a residual after one element per sample of the cotangent is there.

    For elementwise backward rules: decoding and the cotangent's making can then be parts of one
    kernel, and neither is written to memory, as `barrier_together` would have it.

    Args:
        cotangent: The arriving cotangent; axis 0 is the batch.
        residual: What `save_residual` returned.
        decode: Makes an array of as many samples of it, or several.
        codec: As in `barrier_together`; decoding waits for nothing where that ties nothing.

    Returns:
        What `decode` returns.
    """
    first = cotangent[(slice(None), *(slice(1),) * (cotangent.ndim - 1))[: cotangent.ndim]]
    residual, first, never = _held((residual, first, jnp.bool(False)), codec)
    residual = on_device(residual)

    def used(decoded: Array) -> Array:
        """With a use of `first`, without which XLA drops it from the barrier."""
        of_sample = first.astype(decoded.dtype)
        if first.ndim != decoded.ndim:
            of_sample = of_sample.reshape(-1, *(1,) * (decoded.ndim - 1))
        return jnp.where(never, of_sample, decoded)

    decoded, tree = jax.tree.flatten(decode(residual))
    # All are of the one barrier. Of a mask beside values a use would be a kernel of its own.
    floats = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in decoded]
    uses = floats if any(floats) else [True] * len(decoded)
    values = [used(a) if use else a for a, use in zip(decoded, uses, strict=True)]
    return jax.tree.unflatten(tree, values)


def _held(operands: T, codec: SavedBy | None) -> T:
    """A barrier; for a TPU none if what reads the residual there decodes it, too.

    It would cost a pass over the cotangent, which is otherwise a part of the product that makes it
    or reads it.
    """
    if codec is None or not codec.fuses_decode_on_tpu:
        return lax.optimization_barrier(operands)
    return platforms.no_barrier_on_tpu(match_varying(operands))
