"""The data sets of the experiments, as batches that are a function of (seed, epoch, position).

``load`` gives a :class:`Dataset`. The default, ``fashion_mnist_embedded``, is a small subset of
real images that lies in this repository and needs numpy only; the full sets are read with
TensorFlow Datasets (TFDS) and grain, without TensorFlow.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float32, Int32

from experiments.augment import generator, normalize
from experiments.examples import ORDER, Examples, InMemory

EMBEDDED_FILE = Path(__file__).parent / "embedded" / "fashion_mnist.npz"

SplitName = Literal["train", "test"]


class Batch(NamedTuple):
    """Normalised images and their class numbers."""

    images: Float32[np.ndarray, "n h w c"]
    labels: Int32[np.ndarray, " n"]


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set with a training and a test split.

    Attributes:
        name: what it was loaded by.
        num_classes: labels are 0 to ``num_classes - 1``.
        image_shape: (height, width, channels) of an image in a batch.
        mean: per channel, of pixels scaled to 0..1; batches have it subtracted.
        std: per channel, of pixels scaled to 0..1; batches are divided by it.
        train: the training examples; ``len(data.train)`` is their number.
        test: the test examples.
    """

    name: str
    num_classes: int
    image_shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    train: Examples
    test: Examples

    def num_batches(self, split: SplitName, batch_size: int, *, drop_remainder: bool) -> int:
        """The number of batches of one epoch.

        Raises:
            ValueError: ``split`` is unknown, or ``batch_size`` is not 1 to the number of examples.
        """
        num_examples = len(self._examples(split))
        if not 1 <= batch_size <= num_examples:
            raise ValueError(
                f"batch_size={batch_size}: expected 1 to {num_examples}, the number of examples in "
                f"the {split} split of {self.name}"
            )
        return num_examples // batch_size if drop_remainder else -(-num_examples // batch_size)

    def batches(
        self,
        split: SplitName,
        batch_size: int,
        *,
        seed: int,
        epoch: int,
        augment: bool,
        drop_remainder: bool,
        start_batch: int = 0,
    ) -> Iterator[Batch]:
        """The batches of one epoch: images float32 NHWC, labels int32.

        A batch depends on its number in the epoch but not on ``start_batch``, so that training
        resumes at exactly the position in the data where it stopped. The train split is shuffled
        anew every epoch; the test split keeps its order.

        Args:
            split: "train" or "test".
            batch_size: examples in a batch.
            seed: of the order and of the augmentation, 0 or more.
            epoch: 0 or more.
            augment: whether to augment the images at random; what is drawn for an example depends
                on (seed, epoch, example) only.
            drop_remainder: whether to leave out the last batch when it is short.
            start_batch: number of the first batch, 0 to ``num_batches`` (which yields none).

        Raises:
            ValueError: an argument is outside its range.

        Example:
            >>> data = load("fashion_mnist_embedded")
            >>> images, labels = next(data.batches(
            ...     "train", 32, seed=0, epoch=0, augment=True, drop_remainder=True))
            >>> images.shape, labels.shape
            ((32, 28, 28, 1), (32,))
        """
        num_batches = self.num_batches(split, batch_size, drop_remainder=drop_remainder)
        if not 0 <= start_batch <= num_batches:
            raise ValueError(f"start_batch={start_batch}: expected 0 to {num_batches}")
        for name, value in (("seed", seed), ("epoch", epoch)):
            if value < 0:
                raise ValueError(f"{name}={value}: expected 0 or more")
        examples = self._examples(split)
        order = np.arange(len(examples))
        if split == "train":
            generator(seed, epoch, ORDER).shuffle(order)
        order = order[start_batch * batch_size : num_batches * batch_size]
        raw = examples.read(order, batch_size, (seed, epoch) if augment else None)
        return (Batch(normalize(images, self.mean, self.std), labels) for images, labels in raw)

    def _examples(self, split: SplitName) -> Examples:
        if split not in ("train", "test"):
            raise ValueError(f"split={split!r}: expected 'train' or 'test'")
        return self.train if split == "train" else self.test


def load(name: str = "fashion_mnist_embedded", data_dir: Path | str | None = None) -> Dataset:
    """Loads a data set by name.

    Args:
        name: "fashion_mnist_embedded" (8000 training and 2000 test images from this repository),
            "fashion_mnist", "cifar10", "cifar100" or "imagenet2012".
        data_dir: the folder where TFDS keeps its data sets; None for TFDS's own default.

    Raises:
        ValueError: ``name`` is unknown, or ``data_dir`` is given for the embedded data set.
        ModuleNotFoundError: TFDS or grain is not installed (not needed by the embedded data set).
        FileNotFoundError: the data set is not in ``data_dir``; the message says how to get it.

    Example:
        >>> data = load("fashion_mnist_embedded")
        >>> len(data.train), len(data.test), data.num_classes, data.image_shape
        (8000, 2000, 10, (28, 28, 1))
    """
    if name not in _DATASETS:
        raise ValueError(f"name={name!r}: expected one of {', '.join(_DATASETS)}")
    if name == "fashion_mnist_embedded":
        if data_dir is not None:
            raise ValueError(f"data_dir={str(data_dir)!r}: expected None for {name}")
        train, test = _read_embedded()
    else:
        train, test = _read_tfds(name, data_dir)
    return _DATASETS[name](train=train, test=test)


def _read_embedded() -> tuple[Examples, Examples]:
    with np.load(EMBEDDED_FILE) as arrays:
        train, test = (
            InMemory(arrays[f"{split}_images"], arrays[f"{split}_labels"].astype(np.int32))
            for split in ("train", "test")
        )
    return train, test


def _read_tfds(name: str, data_dir: Path | str | None) -> tuple[Examples, Examples]:
    try:
        from experiments import tfds_source  # the embedded data set must not need the extra
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"the data set {name} needs {error.name}: pip install 'jaxcomp[train]'"
        ) from error
    return tfds_source.read(name, data_dir)


_FASHION_MNIST = partial(
    Dataset, num_classes=10, image_shape=(28, 28, 1), mean=(0.2860,), std=(0.3530,)
)
_CIFAR = partial(Dataset, image_shape=(32, 32, 3))

_DATASETS: dict[str, Callable[..., Dataset]] = {
    "fashion_mnist_embedded": partial(_FASHION_MNIST, "fashion_mnist_embedded"),
    "fashion_mnist": partial(_FASHION_MNIST, "fashion_mnist"),
    "cifar10": partial(
        _CIFAR,
        "cifar10",
        num_classes=10,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    ),
    "cifar100": partial(
        _CIFAR,
        "cifar100",
        num_classes=100,
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
    ),
    "imagenet2012": partial(
        Dataset,
        "imagenet2012",
        num_classes=1000,
        image_shape=(224, 224, 3),
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
    ),
}
