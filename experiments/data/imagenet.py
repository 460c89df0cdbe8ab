"""ImageNet: JPEG files that are decoded, cropped and augmented while they are read."""

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np
from jaxtyping import Int, UInt8
from PIL import Image

from experiments.data.augment import generator
from experiments.data.examples import AUGMENTATION, RawBatch

SIZE = 224  # Pixels of a side, in training and in testing.
TEST_RESIZE = 256  # Pixels of the shorter side before the central crop.


@dataclass(frozen=True, eq=False)
class ImageNet:
    """The examples of a random-access source.

    Attributes:
        source: the examples, each a dict {"image": JPEG bytes, "label": class number}.
    """

    source: Sequence[dict[str, Any]]

    def __len__(self) -> int:
        return len(self.source)

    def read(
        self, order: Int[np.ndarray, " n"], batch_size: int, augmentation: tuple[int, int] | None
    ) -> Iterator[RawBatch]:
        """Reads examples in batches, as :meth:`experiments.data.examples.Examples.read`.

        Threads of grain decode the next images in advance.
        """

        def decode(index: int) -> tuple[UInt8[np.ndarray, "224 224 3"], np.int32]:
            example = self.source[int(index)]
            image = Image.open(io.BytesIO(example["image"])).convert("RGB")
            if augmentation is None:
                image = central_crop(image)
            else:
                image = random_resized_crop(image, generator(*augmentation, AUGMENTATION, index))
            return np.asarray(image), np.int32(example["label"])

        examples = grain.MapDataset.source(order).map(decode).to_iter_dataset()
        for images, labels in examples.batch(batch_size):
            yield RawBatch(images, labels)


def central_crop(image: Image.Image) -> Image.Image:
    """Resizes the shorter side to 256 pixels and crops the central 224 x 224 pixels."""
    scale = TEST_RESIZE / min(image.size)
    width, height = (round(side * scale) for side in image.size)
    left, top = (width - SIZE) // 2, (height - SIZE) // 2
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    return resized.crop((left, top, left + SIZE, top + SIZE))


def random_resized_crop(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Resizes a random crop to 224 x 224 pixels and mirrors it with probability 1/2.

    The crop has 8% to 100% of the area and an aspect ratio of 3/4 to 4/3. This is the augmentation
    of Szegedy et al., "Going Deeper with Convolutions" (2014), section 6.
    """
    box = _random_box(*image.size, rng)
    resized = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box)
    if rng.random() < 0.5:
        resized = resized.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return resized


def _random_box(width: int, height: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of a random crop; the central square if ten draws do not fit."""
    for _ in range(10):
        area = width * height * rng.uniform(0.08, 1)
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            left = int(rng.integers(width - crop_width, endpoint=True))
            top = int(rng.integers(height - crop_height, endpoint=True))
            return left, top, left + crop_width, top + crop_height
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side
