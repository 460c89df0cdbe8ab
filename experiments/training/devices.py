"""Places a training state and batches on the devices of all processes."""

from typing import TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jaxcomp.models.sharding import state_shardings

T = TypeVar("T")


def _mesh() -> Mesh:
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def _by_example() -> NamedSharding:
    return NamedSharding(_mesh(), PartitionSpec("data"))


def place(state: T, *, fsdp: bool = False) -> T:
    """Places a state, which is equal on all processes, on all devices.

    Args:
        state: The arrays.
        fsdp: Whether they are sharded, as `jaxcomp.models.sharding.state_shardings` says;
            otherwise each device has a copy.
    """

    def whole(array: Array, sharding: NamedSharding) -> Array:
        values = np.asarray(array)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: values[index])

    return jax.tree.map(whole, state, state_shardings(state, _mesh(), fsdp=fsdp))


def shard(images: np.ndarray, labels: np.ndarray) -> tuple[Array, Array]:
    """Splits a batch over the devices.

    Args:
        images: the images of this process. The number of its devices must divide their number.
        labels: their class numbers.

    Returns:
        The images and the labels of all processes, sharded along the first axis.
    """
    sharding = _by_example()
    return (
        jax.make_array_from_process_local_data(sharding, images),
        jax.make_array_from_process_local_data(sharding, labels),
    )


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
    sharding = _by_example()
    return (
        jax.ShapeDtypeStruct((size, *image_shape), np.float32, sharding=sharding),
        jax.ShapeDtypeStruct((size,), np.int32, sharding=sharding),
    )
