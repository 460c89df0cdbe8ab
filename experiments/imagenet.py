"""ImageNet: JPEG files that are decoded, cropped and augmented as they are read."""

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np
from jaxtyping import Int, UInt8
from PIL import Image

from experiments.augment import generator
from experiments.examples import AUGMENTATION, RawBatch

SIZE = 224  # pixels of a side, in training and in testing
TEST_RESIZE = 256  # pixels of the shorter side before the central crop


@dataclass(frozen=True, eq=False)
class ImageNet:
    """Examples of a random-access source of {"image": JPEG bytes, "label": class number}."""

    source: Sequence[dict[str, Any]]

    def __len__(self) -> int:
        return len(self.source)

    def read(
        self, order: Int[np.ndarray, " n"], batch_size: int, augmentation: tuple[int, int] | None
    ) -> Iterator[RawBatch]:
        """See :meth:`experiments.data.Examples.read`; grain decodes in threads, ahead of time."""

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
    """Resizes the shorter side to 256 pixels and cuts out the central 224 x 224."""
    scale = TEST_RESIZE / min(image.size)
    width, height = (round(side * scale) for side in image.size)
    left, top = (width - SIZE) // 2, (height - SIZE) // 2
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    return resized.crop((left, top, left + SIZE, top + SIZE))


def random_resized_crop(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Resizes a random part to 224 x 224 and mirrors it left to right half of the time.

    The augmentation of Szegedy et al., "Going Deeper with Convolutions" (2014), section 6: 8% to
    100% of the area, aspect ratio 3/4 to 4/3.
    """
    box = _random_box(*image.size, rng)
    resized = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box)
    if rng.random() < 0.5:
        resized = resized.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return resized


def _random_box(width: int, height: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of the part; the largest square when ten draws do not fit."""
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
