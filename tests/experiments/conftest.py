import functools

import numpy as np
import pytest

from experiments.comparison import compare
from experiments.data.datasets import Dataset
from experiments.data.examples import InMemory
from experiments.training import train
from jaxcomp.models import resnet


def make_examples(num, seed, kind=InMemory):
    """Images whose bright rows tell the class, which is 0 to 3."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 4, num).astype(np.int32)
    images = rng.integers(0, 60, (num, 8, 8, 1)).astype(np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[2 * label : 2 * label + 2] += 150
    return kind(images, labels)


def make_dataset(train_kind=InMemory):
    train_split, test_split = make_examples(70, 0, train_kind), make_examples(21, 1)
    return Dataset("tiny", 4, (8, 8, 1), (0.3,), (0.3,), train_split, test_split)


@pytest.fixture
def tiny(monkeypatch):
    """Makes "tiny" the name of a model and of a data set (4 steps of 16 images an epoch)."""
    network = functools.partial(resnet.ResNet, resnet.BasicBlock, (1, 1), 4, imagenet=False)
    monkeypatch.setitem(resnet.MODELS, "tiny", network)
    dataset = make_dataset()
    for module in (train, compare):
        monkeypatch.setattr(module, "load", lambda name, data_dir: dataset)
    return dataset
