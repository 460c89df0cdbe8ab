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

from jaxcomp.codecs import Codec, Exact, Offload
from jaxcomp.varying import alike

T = typing.TypeVar("T")
C = typing.TypeVar("C")


def keep(value: T, residual: C, codec: Codec) -> tuple[T, C]:
    """Ties a forward value to its residual: the residual is made before the value is used.

    Every array of the residual gets the name `jaxcomp/<codec>`, by which a `jax.checkpoint` policy
    may save it.

    A gradient of the gradient would need the derivative of the codec, which has none to speak of:
    it is refused, except for `Exact`.

    What `Offload` made is moved to the host's pinned memory; `tie` and `decode_after` bring it
    back.

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
        residual = undifferentiable(residual)
    value, residual = lax.optimization_barrier((value, residual))
    residual = name(residual, codec)
    return _to_host(value, residual) if isinstance(codec, Offload) else (value, residual)


def written(value: Array) -> Array:
    """An array that is in memory before it is encoded, as it will be anyway.

    A codec reads it more than once, for ranges and then for codes. XLA may otherwise make it anew
    for each, or write what it is made of to memory as well.
    """
    return lax.optimization_barrier(value)


def name(residual: C, codec: Codec) -> C:
    """Gives every array of a residual, any pytree, the name that `keep` gives."""
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, codec.stored_name()), residual)


def wait(value: Array, residual: typing.Any) -> Array:
    """An array that on a GPU is not used before residuals that `Offload` made are on the host.

    XLA for GPUs puts a copy to the host off until somebody waits for it, and keeps the original
    until then. TPUs copy at once.

    Args:
        value: What the forward pass still needs; small, or the operand of elementwise operations.
        residual: What `keep` returned, any pytree.
    """

    def waiting(value: Array, copies: list[Array]) -> Array:
        for copy in copies:
            piece = jax.device_put(copy[(slice(1),) * copy.ndim], jax.memory.Space.Device)
            piece, never = lax.optimization_barrier((piece.reshape(()), jnp.bool(False)))
            value = jnp.where(never, piece.astype(value.dtype), value)
        return value

    value, copies = alike((value, jax.tree.leaves(residual)))
    return lax.platform_dependent(value, copies, cuda=waiting, default=lambda value, _: value)


def _to_host(value: T, residual: C) -> tuple[T, C]:
    """Moves a residual to pinned host memory; the smallest array of the value waits for it."""
    residual = jax.tree.map(lambda leaf: jax.device_put(leaf, jax.memory.Space.Host), residual)
    leaves, tree = jax.tree.flatten(value)
    smallest = min(range(len(leaves)), key=lambda i: leaves[i].size)
    leaves[smallest] = wait(leaves[smallest], residual)
    return jax.tree.unflatten(tree, leaves), residual


def on_device(residual: C) -> C:
    """A residual, any pytree, with what waits in the host's memory brought back."""

    def move(leaf: Array) -> Array:
        on_host = jax.typeof(leaf).memory_space == jax.memory.Space.Host
        return jax.device_put(leaf, jax.memory.Space.Device) if on_host else leaf

    return jax.tree.map(move, residual)


@jax.custom_jvp
def undifferentiable(residual: C) -> C:
    """The same arrays; their derivatives are an error, as `keep` says."""
    return residual


@undifferentiable.defjvp
def _refuse(primals: tuple[C], tangents: tuple[C]) -> typing.NoReturn:
    raise NotImplementedError(
        "second derivatives through a compressed residual are not defined; use codec=Exact()"
    )


def tie(one: C, other: T, codec: Codec | None = None) -> tuple[C, T]:
    """Ties two values of a backward rule: neither is used before both are there.

    A residual tied to the arriving cotangent is decoded no earlier than that. A weight's gradient
    tied to the cotangent that it was made of is made before the cotangent is used again; XLA may
    otherwise put it off to the end of the backward pass, and keep the decoded residual until then.

    Args:
        one: Any pytree, such as what `keep` returned or a weight's gradient.
        other: Any pytree of arrays that are written to memory anyway, such as a cotangent that is
            an operand of a product.
        codec: What the residual is stored by. If it is one with `decoded_by_tpu_readers`, nothing
            is tied on a TPU.

    Returns:
        Both, to be used in place of the arguments.
    """
    one, other = _held((one, other), codec)
    return on_device(one), other


def decode_after(
    cotangent: Array, residual: C, decode: Callable[[C], T], codec: Codec | None = None
) -> T:
    """Decodes a residual after one element per sample of the cotangent is there.

    For elementwise backward rules: decoding and the cotangent's making can then be parts of one
    kernel, and neither is written to memory, as `tie` would have it.

    Args:
        cotangent: The arriving cotangent; axis 0 is the batch.
        residual: What `keep` returned.
        decode: Makes an array of as many samples of it, or several.
        codec: As in `tie`; decoding waits for nothing where that ties nothing.

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


def _held(operands: T, codec: Codec | None) -> T:
    """A barrier; for a TPU none if what reads the residual there decodes it, too.

    It would cost a pass over the cotangent, which is otherwise a part of the product that makes it
    or reads it.
    """
    if codec is None or not codec.decoded_by_tpu_readers:
        return lax.optimization_barrier(operands)
    return lax.platform_dependent(
        alike(operands), tpu=lambda operands: operands, default=lax.optimization_barrier
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
