"""Examples of a data set, read by their index."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Int, Int32, UInt8

from experiments.augment import generator, pad_crop_flip

ORDER, AUGMENTATION = 0, 1  # the random streams of one (seed, epoch)


class RawBatch(NamedTuple):
    """Images as bytes and their class numbers."""

    images: UInt8[np.ndarray, "n h w c"]
    labels: Int32[np.ndarray, " n"]


class Examples(Protocol):
    """The examples of one split, read by their index."""

    def __len__(self) -> int:
        """The number of examples."""
        ...

    def read(
        self, order: Int[np.ndarray, " n"], batch_size: int, augmentation: tuple[int, int] | None
    ) -> Iterator[RawBatch]:
        """Yields the examples at the indices ``order`` in batches; only the last may be short.

        Args:
            order: indices of the examples.
            batch_size: examples in a batch.
            augmentation: (seed, epoch) of the random augmentation; None for the images as tested.
        """
        ...


@dataclass(frozen=True, eq=False)
class InMemory:
    """Examples held in memory; they are augmented by padding, random crop and random flip."""

    images: UInt8[np.ndarray, "n h w c"]
    labels: Int32[np.ndarray, " n"]
    pad: int = 4

    def __len__(self) -> int:
        return len(self.images)

    def read(
        self, order: Int[np.ndarray, " n"], batch_size: int, augmentation: tuple[int, int] | None
    ) -> Iterator[RawBatch]:
        """See :meth:`Examples.read`."""
        if augmentation is not None:
            # Drawn for every example at once, so that an example's choice is its own in any order.
            rng = generator(*augmentation, AUGMENTATION)
            offsets = rng.integers(0, 2 * self.pad, size=(len(self), 2), endpoint=True)
            flips = rng.random(len(self)) < 0.5
        for start in range(0, len(order), batch_size):
            index = order[start : start + batch_size]
            images = self.images[index]
            if augmentation is not None:
                images = pad_crop_flip(images, offsets[index], flips[index], self.pad)
            yield RawBatch(images, self.labels[index])
