"""Reads data sets that TensorFlow Datasets (TFDS) prepared as array_record, without TensorFlow.

Small data sets are decoded into memory once. ImageNet is decoded while it is read.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grain
import numpy as np
import tensorflow_datasets as tfds

from experiments.data.examples import Examples, InMemory
from experiments.data.imagenet import ImageNet


def read(name: str, data_dir: Path | str | None) -> tuple[Examples, Examples]:
    """Reads the training and the test examples of a data set.

    The test examples of ImageNet are the split "validation" of TFDS.

    Args:
        name: TFDS's name of the data set.
        data_dir: the folder of the TFDS data sets. None is the default folder of TFDS.

    Returns:
        The training examples and the test examples.

    Raises:
        FileNotFoundError: the data set is not in ``data_dir``. The message tells how to get it.
    """
    builder = tfds.builder(name, data_dir=data_dir)
    if not builder.is_prepared():
        raise FileNotFoundError(
            f"data set {name} not found in {builder.data_dir}; to get it: {_how_to_get(name)}"
        )
    if name == "imagenet2012":
        encoded = {"image": tfds.decode.SkipDecoding()}
        train, test = builder.as_data_source(["train", "validation"], decoders=encoded)
        return ImageNet(train), ImageNet(test)
    train, test = builder.as_data_source(["train", "test"])
    return _decode(train), _decode(test)


def _decode(source: Sequence[Any]) -> InMemory:
    examples = grain.MapDataset.source(source).map(lambda x: (x["image"], np.int32(x["label"])))
    # Python's global lock limits the decoding of small images. More than two threads are slower.
    two_threads = grain.ReadOptions(num_threads=2)
    images, labels = zip(*examples.to_iter_dataset(two_threads), strict=True)
    return InMemory(np.stack(images), np.stack(labels))


def _how_to_get(name: str) -> str:
    if name == "fashion_mnist":
        return "python -m experiments.data.prepare tfds --data-dir DIR (see its --help)"
    command = f"tfds build {name} --file_format=array_record --data_dir=DIR"
    if name == "imagenet2012":
        command += " --manual_dir=FOLDER_OF_THE_TWO_TAR_FILES"
    return f"{command} (this tool needs TensorFlow installed; reading its result does not)"
