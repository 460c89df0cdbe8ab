"""Data parallelism: a copy of the state on every device, a part of the batch on each."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

from jaxcomp.models.training import TrainState


def _sharding(*axes: str) -> NamedSharding:
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec(*axes))


def replicate(state: TrainState) -> TrainState:
    """Puts a copy of the state on every device there is."""
    return jax.device_put(state, _sharding())


def shard(images: np.ndarray, labels: np.ndarray) -> tuple[Array, Array]:
    """Splits a batch over the devices there are."""
    return jax.device_put((images, labels), _sharding("data"))


def abstract_batch(
    size: int, image_shape: tuple[int, int, int]
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """The types of what :func:`shard` gives for a batch of ``size`` images, to trace a step by."""
    sharding = _sharding("data")
    return (
        jax.ShapeDtypeStruct((size, *image_shape), jnp.float32, sharding=sharding),
        jax.ShapeDtypeStruct((size,), jnp.int32, sharding=sharding),
    )
