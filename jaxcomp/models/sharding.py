"""Shardings of a training step's state: a copy on each device, or a part."""

import math
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

_SMALL = 2**14  # elements: gathering fewer takes longer than it saves


def state_shardings(state: Any, mesh: Mesh | AbstractMesh, *, fsdp: bool = False) -> Any:
    """Returns the sharding of each array of a training state.

    With `fsdp`, an array of 16,384 elements or more is sharded over all devices, along its largest
    axis that their number divides. This is FSDP, or ZeRO-3, where the mesh is also that of the
    batch: XLA gathers a parameter where it is used, and scatters its gradient. All other arrays
    have a copy on each device.

    Args:
        state: A pytree of arrays or their shapes.
        mesh: The devices.
        fsdp: Whether arrays are sharded.

    Returns:
        A pytree of the same structure, for `jax.device_put` or `jax.ShapeDtypeStruct`.

    Example:
        >>> import jax.numpy as jnp
        >>> mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
        >>> shardings = state_shardings({"kernel": jnp.ones((64, 512))}, mesh, fsdp=True)
        >>> shardings["kernel"].is_fully_replicated  # one device has all of it
        True
    """

    def of(array: Any) -> NamedSharding:
        axes = [n for n, size in enumerate(array.shape) if size % mesh.size == 0]
        if not fsdp or math.prod(array.shape) < _SMALL or not axes:
            return NamedSharding(mesh, PartitionSpec())
        largest = max(axes, key=lambda axis: array.shape[axis])
        return NamedSharding(mesh, PartitionSpec(*[None] * largest, mesh.axis_names))

    return jax.tree.map(of, state)
