"""The examples of a data set, which are read by index."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Int, Int32, UInt8

from experiments.data.augment import generator, pad_crop_flip

ORDER, AUGMENTATION = 0, 1  # The random streams of one (seed, epoch).


class RawBatch(NamedTuple):
    """A batch of examples before normalization.

    Attributes:
        images: uint8 of shape (n, height, width, channels).
        labels: class numbers, int32 of shape (n,).
    """

    images: UInt8[np.ndarray, "n h w c"]
    labels: Int32[np.ndarray, " n"]


class Examples(Protocol):
    """The examples of one split, which are read by index."""

    def __len__(self) -> int:
        """The number of examples."""
        ...

    def read(
        self, order: Int[np.ndarray, " n"], batch_size: int, augmentation: tuple[int, int] | None
    ) -> Iterator[RawBatch]:
        """Reads examples in batches.

        Args:
            order: the indices of the examples, in the order of reading.
            batch_size: the number of examples in a batch.
            augmentation: (seed, epoch) of the random augmentation; None for no augmentation.

        Yields:
            The batches. Only the last one may be short.
        """
        ...


@dataclass(frozen=True, eq=False)
class InMemory:
    """Examples in memory. Their augmentation is padding, a random crop and a random flip.

    Attributes:
        images: uint8 of shape (n, height, width, channels).
        labels: class numbers, int32 of shape (n,).
        pad: pixels of padding on each side.
    """

    images: UInt8[np.ndarray, "n h w c"]
    labels: Int32[np.ndarray, " n"]
    pad: int = 4

    def __len__(self) -> int:
        return len(self.images)

    def read(
        self, order: Int[np.ndarray, " n"], batch_size: int, augmentation: tuple[int, int] | None
    ) -> Iterator[RawBatch]:
        """Reads examples in batches, as :meth:`Examples.read`."""
        if augmentation is not None:
            # Draws for all examples, so that the draw of an example does not depend on ``order``.
            rng = generator(*augmentation, AUGMENTATION)
            offsets = rng.integers(0, 2 * self.pad, size=(len(self), 2), endpoint=True)
            flips = rng.random(len(self)) < 0.5
        for start in range(0, len(order), batch_size):
            index = order[start : start + batch_size]
            images = self.images[index]
            if augmentation is not None:
                images = pad_crop_flip(images, offsets[index], flips[index], self.pad)
            yield RawBatch(images, self.labels[index])
