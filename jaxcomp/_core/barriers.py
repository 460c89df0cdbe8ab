"""Optimisation barriers that make XLA save a residual's code instead of the residual.

Encoding a residual in 2 bits does not by itself make XLA keep only 2 bits. XLA may delay the
encoding until just before the backward pass and keep the full array; it may decode early; or it may
use the decoded array late. Barriers prevent all three. `save_residual` belongs in the forward rule
of a `jax.custom_vjp`, `barrier_together` or `decode_after` in its backward rule.

An array that passes a barrier is written to memory. Each barrier therefore takes an array that is
written to memory anyway. XLA removes unused operands from a barrier, so each operand is also used.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, NoReturn, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from jaxcomp._core import platforms
from jaxcomp._core.one_device import on_one
from jaxcomp._core.shard_map import match_varying

T = TypeVar("T")
C = TypeVar("C")
V = TypeVar("V")


@runtime_checkable
class SavedBy(Protocol):
    """The properties of a codec that barriers read; `jaxcomp.codecs.Codec` documents them."""

    is_exact: ClassVar[bool]
    on_host: ClassVar[bool]

    @property
    def fuses_decode_on_tpu(self) -> bool: ...

    def stored_name(self) -> str: ...


def save_residual(value: T, residual: C, codec: SavedBy) -> tuple[T, C]:
    """Saves a residual for the backward pass; it is computed before `value` is used.

    Every array of the residual gets the name `jaxcomp/<codec>`. A `jax.checkpoint` policy can save
    it by that name. The residual of a codec with `on_host` is moved to the host's pinned memory;
    `barrier_together` and `decode_after` copy it back.

    Second derivatives would need the derivative of the codec, which is not defined. They are an
    error, except for `Exact`.

    Args:
        value: Any pytree; an input or result of the operation that is written to memory anyway.
        residual: Any pytree; the encoded residual to save.
        codec: Codec of the residual.

    Returns:
        `value` and `residual`, to be used in place of the arguments.

    Raises:
        NotImplementedError: When the residual is differentiated.
    """
    return _saved(value, residual, codec, lambda *both: lax.optimization_barrier(both))


def save_operands(
    operands: T, function: Callable[[T], Array], residual: C, codec: SavedBy
) -> tuple[Array, C]:
    """Does what `save_residual` does with `function(operands)` and the residual.

    On a TPU the operands are written to memory, not the result: a codec reads them anyway, and XLA
    computes the function where it is read.

    Args:
        operands: Any pytree of arrays.
        function: Elementwise, and cheap.
        residual: As in `save_residual`.
        codec: As there.
    """

    def before(operands: T, residual: C) -> tuple[Array, C]:
        operands, residual = lax.optimization_barrier((operands, residual))
        return function(operands), residual

    def after(operands: T, residual: C) -> tuple[Array, C]:
        return lax.optimization_barrier((function(operands), residual))

    def hold(operands: T, residual: C) -> tuple[Array, C]:
        return platforms.hold_operands_on_tpu((operands, residual), before, after)

    return _saved(operands, residual, codec, hold)


def _saved(
    operands: T, residual: C, codec: SavedBy, hold: Callable[[T, C], tuple[V, C]]
) -> tuple[V, C]:
    """Saves a residual, which `hold` computes before the value that it returns is used."""
    if not codec.is_exact:
        residual = undifferentiable(residual)
    value, residual = hold(operands, residual)
    residual = name_residual(residual, codec)
    return to_host(value, residual) if codec.on_host else (value, residual)


def materialize(value: Array) -> Array:
    """Writes an array to memory before it is encoded.

    A codec may read the array twice, for ranges and for codes. Without the barrier, XLA may compute
    the array again for each read, or write its operands to memory too.
    """
    return lax.optimization_barrier(value)


def name_residual(residual: C, codec: SavedBy) -> C:
    """Returns names every array of a residual, any pytree, as `save_residual` does."""
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, codec.stored_name()), residual)


def await_host_copy(value: Array, residual: Any) -> Array:
    """Delays the use of an array on a GPU until residuals of `Offload` are copied to the host.

    XLA for GPUs delays a copy to the host until its result is used, and keeps the original until
    then. TPUs copy at once.

    Args:
        value: Array that the forward pass still needs; small, or an operand of elementwise
            operations.
        residual: Any pytree; the residual that `save_residual` returned.

    Returns:
        `value`, to be used in place of the argument.
    """
    value, copies = match_varying((value, jax.tree.leaves(residual)))
    held: Array = _after_copies(value, copies)
    return held


@jax.custom_jvp
def _after_copies(value: Array, copies: list[Array]) -> Array:
    held: Array = _after_copies_of_examples(value, copies)
    return held


@_after_copies.defjvp
def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
    # The rule for `jax.vmap` has no derivative.
    return _after_copies(*primals), tangents[0]


@jax.custom_batching.custom_vmap
def _after_copies_of_examples(value: Array, copies: list[Array]) -> Array:
    return platforms.hold_until_copied_on_gpu((value, copies), _waiting)


@_after_copies_of_examples.def_vmap
def _(count: int, is_batched: Any, value: Array, copies: list[Array]) -> tuple[Array, bool]:
    # A value that all examples share, such as a kernel, stays one: it waits for all copies.
    return _after_copies_of_examples(value, copies), is_batched[0]


def _waiting(value: Array, copies: list[Array]) -> Array:
    for copy in copies:
        piece = jax.device_put(copy[(slice(1),) * copy.ndim], jax.memory.Space.Device)
        piece, never = lax.optimization_barrier((piece.reshape(()), jnp.bool(False)))
        value = jnp.where(never, piece.astype(value.dtype), value)
    return value


def to_host(value: T, residual: C) -> tuple[T, C]:
    """Moves a residual to pinned host memory; the smallest array of `value` waits for the copy."""
    residual = jax.tree.map(lambda leaf: jax.device_put(leaf, jax.memory.Space.Host), residual)
    leaves, tree = jax.tree.flatten(value)
    smallest = min(range(len(leaves)), key=lambda i: leaves[i].size)
    leaves[smallest] = await_host_copy(leaves[smallest], residual)
    return jax.tree.unflatten(tree, leaves), residual


def on_device(residual: C) -> C:
    """Copies the arrays of a residual, any pytree, from host memory to the device."""

    def move(leaf: Array) -> Array:
        on_host = jax.typeof(leaf).memory_space == jax.memory.Space.Host
        return jax.device_put(leaf, jax.memory.Space.Device) if on_host else leaf

    return jax.tree.map(move, residual)


@jax.custom_jvp
def undifferentiable(residual: C) -> C:
    """Returns the arrays unchanged; differentiating them is an error."""
    return residual


@undifferentiable.defjvp
def _refuse(primals: tuple[C], tangents: tuple[C]) -> NoReturn:
    raise NotImplementedError(
        "second derivatives through an encoded residual are not defined; put jaxcomp.checkpoint "
        "around the whole loss that takes the inner gradient of the stock model, or keep the "
        "residual as it is, by the codec Exact() or the policy 'exact'"
    )


@jax.custom_jvp
def without_tangent(indices: Array) -> Array:
    """Returns integers unchanged, without the tangent that a barrier gives them.

    A branch takes no tangent of its index.
    """
    return indices


@without_tangent.defjvp
def _keep(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return primals[0], tangents[0]


def barrier_together(one: C, other: T, *, except_on_tpu: bool = False) -> tuple[C, T]:
    """Places one barrier around two values of a backward rule: neither is used before both exist.

    A residual in a barrier with the arriving cotangent is not decoded before the cotangent exists.
    A weight gradient in a barrier with the cotangent it was computed from is computed before the
    cotangent is used again. Otherwise XLA may delay it to the end of the backward pass and keep the
    decoded residual until then.

    Args:
        one: Any pytree, such as a residual from `save_residual` or a weight gradient.
        other: Any pytree of arrays that are written to memory anyway, such as a cotangent that a
            product reads.
        except_on_tpu: Whether there is no barrier on a TPU. It would add a pass over `other`, which
            XLA can fuse with the convolution that computes or reads it.

    Returns:
        Both values, to be used in place of the arguments.
    """
    one, other = _held((one, other), except_on_tpu)
    return on_device(one), other


@jax.custom_jvp
def gradient_before(gradient: C, cotangent: T) -> tuple[C, T]:
    """Computes a weight's gradient before the cotangent that it came from is used again.

    Under `jax.vmap` over examples, JAX sums the gradients of all examples afterwards. XLA makes one
    product of that sum and the products of the examples, unless a barrier stands between them.
    So there is none for gradients that are larger than their cotangents.

    Args:
        gradient: Any pytree of arrays.
        cotangent: Any pytree of arrays that are written to memory anyway.

    Returns:
        Both values, to be used in place of the arguments.
    """
    both: tuple[C, T] = _unless_of_examples(gradient, cotangent)
    return both


@gradient_before.defjvp
def _of_both(primals: tuple[C, T], tangents: tuple[C, T]) -> Any:
    # The rule for `jax.vmap` has no derivative.
    return gradient_before(*primals), tangents


@jax.custom_batching.custom_vmap
def _unless_of_examples(gradient: Any, cotangent: Any) -> Any:
    return lax.optimization_barrier((gradient, cotangent))


@_unless_of_examples.def_vmap
def _of_examples(count: int, is_batched: Any, gradient: Any, cotangent: Any) -> Any:
    def elements(value: Any, flags: Any) -> int:
        """Returns the elements of one example."""
        of_each = jax.tree.map(
            lambda a, batched: a.size // count if batched else a.size, value, flags
        )
        return sum(jax.tree.leaves(of_each))

    flags_of_gradient, flags_of_cotangent = is_batched
    if elements(gradient, flags_of_gradient) <= elements(cotangent, flags_of_cotangent):
        gradient, cotangent = _unless_of_examples(gradient, cotangent)
    return (gradient, cotangent), (flags_of_gradient, flags_of_cotangent)


def decode_after(
    cotangent: Array, residual: C, decode: Callable[[C], T], codec: SavedBy | None = None
) -> T:
    """Decodes a residual once one element per sample of the cotangent exists.

    This form is for elementwise backward rules. XLA can fuse decoding and the computation of the
    cotangent into one kernel, and writes neither to memory. `barrier_together` would write both.

    Args:
        cotangent: The arriving cotangent; axis 0 is the batch.
        residual: Any pytree; the residual that `save_residual` returned.
        decode: Function of the residual that returns one or more arrays with as many samples.
        codec: Codec of the residual. On a TPU there is no barrier if it has `fuses_decode_on_tpu`.

    Returns:
        The result of `decode`.
    """
    residual, first, never = _until(cotangent, residual, codec)
    decoded, tree = jax.tree.flatten(decode(residual))
    # If there are floats, only they use `first`: all values come from one barrier, and a use in a
    # mask would be a separate kernel.
    floats = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in decoded]
    uses = floats if any(floats) else [True] * len(decoded)
    values = [_using(a, first, never) if use else a for a, use in zip(decoded, uses, strict=True)]
    return jax.tree.unflatten(tree, values)


class Hold(NamedTuple):
    """What uses the element of a cotangent that a residual waits for.

    XLA would otherwise remove the element from the barrier.

    Attributes:
        first: One element per sample of the cotangent.
        never: False.
        in_values: Whether each value uses it on every number of devices, as copies from the host
            have to: XLA for GPUs copies more of them at once if a sum uses it.
    """

    first: Array
    never: Array
    in_values: bool

    def use(self, decoded: Array) -> Array:
        """Uses the element in each value, in a program for several devices."""
        if self.in_values:
            return _using(decoded, self.first, self.never)
        return on_one(None, lambda *a: a[0], _using)(decoded, self.first, self.never)

    def use_in_sum(self, total: Array) -> Array:
        """Uses the element in what is summed over the batch, in a program for one device.

        That takes no instruction for each value, but would take a sum over devices.
        """

        def using(total: Array, first: Array, never: Array) -> Array:
            one = first.ravel()[:1].sum(dtype=total.dtype)  # a sum of all would be a kernel
            return jnp.where(never, one, total)

        if self.in_values:
            return total
        return on_one(None, using, lambda *a: a[0])(total, self.first, self.never)


def hold_until(cotangent: Array, residual: C, codec: SavedBy | None = None) -> tuple[C, Hold]:
    """Holds a residual until one element per sample of the cotangent exists, as `decode_after`.

    Args:
        cotangent: As in `decode_after`.
        residual: As there.
        codec: As there.

    Returns:
        The residual, and what has to be used in the values that it is decoded to, and in a sum over
        the batch that all results depend on.
    """
    residual, first, never = _until(cotangent, residual, codec)
    return residual, Hold(first, never, in_values=codec is not None and codec.on_host)


def _until(cotangent: Array, residual: C, codec: SavedBy | None) -> tuple[C, Array, Array]:
    """Returns a residual that waits for an element per sample, this element, and False."""
    first = cotangent[(slice(None), *(slice(1),) * (cotangent.ndim - 1))[: cotangent.ndim]]
    is_fused = codec is not None and codec.fuses_decode_on_tpu
    residual, first, never = _held((residual, first, jnp.bool(False)), is_fused)
    return on_device(residual), first, never


def _using(decoded: Array, first: Array, never: Array) -> Array:
    """Uses `first` in the result."""
    of_sample = first.astype(decoded.dtype)
    if first.ndim != decoded.ndim:
        of_sample = of_sample.reshape(-1, *(1,) * (decoded.ndim - 1))
    return jnp.where(never, of_sample, decoded)


def _held(operands: T, except_on_tpu: bool) -> T:
    """Places a barrier around the operands."""
    if except_on_tpu:
        return platforms.no_barrier_on_tpu(match_varying(operands))
    return lax.optimization_barrier(operands)
