"""The data sets of the experiments.

``load`` returns a :class:`Dataset`. Its batches are a function of the seed, the epoch and the
position in the epoch. The default data set, ``fashion_mnist_embedded``, is a small subset of real
images in this repository, and needs only numpy. The full data sets are read by TensorFlow Datasets
(TFDS) and grain, without TensorFlow.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float32, Int32

from experiments.data.augment import generator, normalize
from experiments.data.examples import ORDER, Examples, InMemory

EMBEDDED_FILE = Path(__file__).parent / "embedded" / "fashion_mnist.npz"

SplitName = Literal["train", "test"]


class Batch(NamedTuple):
    """A batch of examples.

    Attributes:
        images: normalized images, float32 of shape (n, height, width, channels).
        labels: class numbers, int32 of shape (n,).
    """

    images: Float32[np.ndarray, "n h w c"]
    labels: Int32[np.ndarray, " n"]


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set with a training and a test split.

    Attributes:
        name: the name passed to ``load``.
        num_classes: the number of classes. Labels are 0 to ``num_classes - 1``.
        image_shape: (height, width, channels) of an image in a batch.
        mean: the mean of each channel, for pixels scaled to 0..1. Batches have it subtracted.
        std: the standard deviation of each channel, for pixels scaled to 0..1. Batches are divided
            by it.
        train: the training examples. ``len(data.train)`` is their number.
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
        """The number of batches in one epoch.

        Args:
            split: "train" or "test".
            batch_size: the number of examples in a batch.
            drop_remainder: whether to drop the last batch if it is short.

        Returns:
            The number of batches.

        Raises:
            ValueError: ``split`` is unknown, or ``batch_size`` is less than 1 or more than the
                number of examples.

        Example:
            >>> data = load("fashion_mnist_embedded")
            >>> data.num_batches("train", 300, drop_remainder=True)
            26
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
        part: int = 0,
        parts: int = 1,
    ) -> Iterator[Batch]:
        """Iterates over the batches of one epoch.

        A batch depends on its number in the epoch and not on ``start_batch``. Training can
        therefore resume at the exact position where it stopped. The training split is shuffled
        anew in every epoch. The test split keeps its order.

        Args:
            split: "train" or "test".
            batch_size: the number of examples in a batch.
            seed: the seed of the order and of the augmentation, 0 or more.
            epoch: the number of the epoch, 0 or more.
            augment: whether to augment the images at random. The augmentation of an example
                depends only on the seed, the epoch and the example.
            drop_remainder: whether to drop the last batch if it is short.
            start_batch: the number of the first batch, 0 to ``num_batches``. The latter gives no
                batches.
            part: the number of the part of each batch that is read, 0 or more.
            parts: the number of parts, which divides ``batch_size``.

        Returns:
            The batches, or their parts: images float32 of shape (n, height, width, channels),
            labels int32 of shape (n,). The part of a short batch may be short, or left out.

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
        if parts < 1 or batch_size % parts:
            raise ValueError(f"parts={parts}: expected a divisor of batch_size={batch_size}")
        if not 0 <= part < parts:
            raise ValueError(f"part={part}: expected 0 to {parts - 1}")
        examples = self._examples(split)
        order = np.arange(len(examples))
        if split == "train":
            generator(seed, epoch, ORDER).shuffle(order)
        order = order[start_batch * batch_size : num_batches * batch_size]
        size = batch_size // parts
        order = order[np.arange(len(order)) % batch_size // size == part]
        raw = examples.read(order, size, (seed, epoch) if augment else None)
        return (Batch(normalize(images, self.mean, self.std), labels) for images, labels in raw)

    def _examples(self, split: SplitName) -> Examples:
        if split not in ("train", "test"):
            raise ValueError(f"split={split!r}: expected 'train' or 'test'")
        return self.train if split == "train" else self.test


def check_batch(images: np.ndarray, labels: np.ndarray, dataset: Dataset) -> None:
    """Checks a batch that a data set has read.

    Raises:
        ValueError: If images are not float32 or have another shape, or a label is no class.
    """
    if images.dtype != np.float32 or images.shape[1:] != dataset.image_shape:
        raise ValueError(
            f"{dataset.name}: images of dtype {images.dtype} and shape {images.shape[1:]}, "
            f"expected float32 and {dataset.image_shape}"
        )
    if not np.issubdtype(labels.dtype, np.integer) or labels.shape != images.shape[:1]:
        raise ValueError(
            f"{dataset.name}: labels of dtype {labels.dtype} and shape {labels.shape}, expected "
            f"integers and {images.shape[:1]}"
        )
    if labels.size and not 0 <= labels.min() <= labels.max() < dataset.num_classes:
        raise ValueError(
            f"{dataset.name}: labels from {labels.min()} to {labels.max()}, expected 0 to "
            f"{dataset.num_classes - 1}"
        )


def load(name: str = "fashion_mnist_embedded", data_dir: Path | str | None = None) -> Dataset:
    """Loads a data set by name.

    Args:
        name: "fashion_mnist_embedded" (8000 training and 2000 test images from this repository),
            "fashion_mnist", "cifar10", "cifar100" or "imagenet2012".
        data_dir: the folder of the TFDS data sets. None is the default folder of TFDS.

    Returns:
        The data set.

    Raises:
        ValueError: ``name`` is unknown, or ``data_dir`` is given for the embedded data set.
        ModuleNotFoundError: TFDS or grain is not installed. The embedded data set needs neither.
        FileNotFoundError: the data set is not in ``data_dir``. The message tells how to get it.

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
        from experiments.data import tfds_source  # the embedded data set needs no extra
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
