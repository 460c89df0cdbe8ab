"""Data parallelism: each device has a copy of the state and a part of the batch."""

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
    """Copies the state to every attached device."""
    return jax.device_put(state, _sharding())


def shard(images: np.ndarray, labels: np.ndarray) -> tuple[Array, Array]:
    """Splits a batch over the attached devices.

    Args:
        images: the images of the batch. The number of devices must divide its size.
        labels: their class numbers.

    Returns:
        The images and the labels, sharded along the first axis.
    """
    return jax.device_put((images, labels), _sharding("data"))


def abstract_batch(
    size: int, image_shape: tuple[int, int, int]
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """The shapes, dtypes and shardings of the arrays that :func:`shard` returns.

    Args:
        size: the number of images in the batch.
        image_shape: (height, width, channels) of an image.

    Returns:
        The abstract images (float32) and labels (int32).
    """
    sharding = _sharding("data")
    return (
        jax.ShapeDtypeStruct((size, *image_shape), jnp.float32, sharding=sharding),
        jax.ShapeDtypeStruct((size,), jnp.int32, sharding=sharding),
    )
