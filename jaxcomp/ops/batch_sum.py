"""Sums over the batch by a kernel, where the batch is spread over devices."""

import typing
from collections.abc import Callable

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float


def batch_sum(
    kernel: Callable[..., Array], *operands: Array, cotangent: Float[Array, "batch ... columns"]
) -> Float[Array, "features columns"]:
    """Calls `kernel(*operands, cotangent)` on each device's part of the batch, and adds up.

    XLA cannot look into a kernel: without this, it gathers what `jit` has spread over devices.
    Columns stay spread, too. Under `vmap` the batch is gathered. Inside `jax.shard_map` a part is
    all that there is, and adding up is up to the caller, as of any sum.

    Args:
        kernel: Sums over axis 0 of all its arguments, whatever its size and that of the columns.
        operands: Arrays whose axis 0 is the batch.
        cotangent: The last argument, whose last axis is that of the result.

    Returns:
        The sum.
    """
    arguments = (*operands, cotangent)
    if jax.sharding.get_abstract_mesh().manual_axes:
        return kernel(*arguments)

    @jax.custom_batching.custom_vmap
    def call(*arguments: Array) -> Array:
        return spread(*arguments)

    @call.def_vmap
    def _(size: int, in_batched: typing.Any, *arguments: Array) -> tuple[Array, bool]:
        axes = [0 if batched else None for batched in in_batched]
        return jax.vmap(kernel, axes)(*arguments), True

    spread = custom_partitioning(kernel)
    spread.def_partition(
        partition=_partition(kernel), sharding_rule=_rule([a.ndim for a in arguments])
    )
    return call(*arguments)


def _rule(ranks: list[int]) -> str:
    """Axes by name, as `custom_partitioning` takes them: batch first, columns last of the last."""
    names = [
        ["batch", *(f"i{n}x{axis}" for axis in range(1, ndim))] for n, ndim in enumerate(ranks)
    ]
    names[-1][-1] = "columns"
    return ", ".join(map(" ".join, names)) + " -> features columns"


def _partition(kernel: Callable[..., Array]) -> Callable[..., typing.Any]:
    """What each device computes, and how arguments and result lie."""

    def partition(mesh: typing.Any, arguments: typing.Any, result: typing.Any) -> typing.Any:
        batch, *_, columns = arguments[-1].sharding.spec

        def placed(*spec: typing.Any) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*spec))

        def part(*parts: Array) -> Array:
            total = kernel(*parts)
            return lax.psum(total, batch) if batch else total

        places = [placed(batch, *[None] * (a.ndim - 1)) for a in arguments]
        places[-1] = placed(batch, *[None] * (arguments[-1].ndim - 2), columns)
        return mesh, part, placed(None, columns), tuple(places)

    return partition
