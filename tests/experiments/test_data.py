import subprocess
import sys

import numpy as np
import pytest

from experiments.data import datasets as data
from experiments.data.augment import normalize, pad_crop_flip


@pytest.fixture(scope="module")
def dataset():
    return data.load("fashion_mnist_embedded")


def epoch(dataset, split="train", batch_size=1000, **changes):
    arguments = {"seed": 0, "epoch": 0, "augment": True, "drop_remainder": False} | changes
    return list(dataset.batches(split, batch_size, **arguments))


def whole(batches):
    images, labels = zip(*batches, strict=True)
    return np.concatenate(images), np.concatenate(labels)


def assert_same(batches, expected):
    assert len(batches) == len(expected)
    for batch, other in zip(batches, expected, strict=True):
        np.testing.assert_array_equal(batch.images, other.images)
        np.testing.assert_array_equal(batch.labels, other.labels)


def test_embedded_is_small_and_carries_its_licence():
    folder = data.EMBEDDED_FILE.parent
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 4_000_000
    licence = (folder / "LICENSE").read_text()
    assert "MIT License" in licence
    assert "Zalando SE" in licence


@pytest.mark.parametrize(("split", "size"), [("train", 8000), ("test", 2000)])
def test_embedded_is_balanced(dataset, split, size):
    images, labels = whole(epoch(dataset, split, augment=False))
    assert images.shape == (size, 28, 28, 1)
    assert images.dtype == np.float32
    assert labels.dtype == np.int32
    assert np.bincount(labels).tolist() == [size // 10] * 10
    assert len(np.unique(images, axis=0)) > 0.99 * size  # real pictures, hardly any twice


def test_embedded_is_normalised(dataset):
    images, _ = whole(epoch(dataset, augment=False))
    assert abs(images.mean()) < 0.02  # the constants are those of the full data set
    assert abs(images.std() - 1) < 0.02


def test_embedded_needs_numpy_only():
    code = """
import sys
for name in ("tensorflow_datasets", "grain", "PIL", "typer", "tensorflow"):
    sys.modules[name] = None
from experiments.data import datasets as data
dataset = data.load()
next(dataset.batches("train", 8, seed=0, epoch=0, augment=True, drop_remainder=True))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_train_is_a_permutation_and_test_keeps_its_order(dataset):
    for split, examples in (("train", dataset.train), ("test", dataset.test)):
        images, labels = whole(epoch(dataset, split, augment=False))
        stored = normalize(examples.images, dataset.mean, dataset.std)
        kept = np.array_equal(images, stored) and np.array_equal(labels, examples.labels)
        assert kept == (split == "test")

        def rows(images, labels):
            table = np.column_stack([images.reshape(len(images), -1), labels])
            return table[np.lexsort(table.T)]

        np.testing.assert_array_equal(rows(images, labels), rows(stored, examples.labels))


@pytest.mark.parametrize("start_batch", [0, 1, 5, 8])
def test_resumed_epoch_equals_the_unbroken_one(dataset, start_batch):
    unbroken = epoch(dataset, batch_size=900, seed=3, epoch=2)
    resumed = epoch(dataset, batch_size=900, seed=3, epoch=2, start_batch=start_batch)
    assert_same(resumed, unbroken[start_batch:])


def test_start_at_the_end_gives_no_batch(dataset):
    assert epoch(dataset, batch_size=1000, start_batch=8) == []


@pytest.mark.parametrize("changes", [{"seed": 1}, {"epoch": 1}])
def test_order_and_augmentation_follow_seed_and_epoch(dataset, changes):
    _, labels = whole(epoch(dataset))
    _, other_labels = whole(epoch(dataset, **changes))
    assert not np.array_equal(labels, other_labels)
    images, _ = whole(epoch(dataset, "test"))  # in a fixed order: what differs is the augmentation
    other_images, _ = whole(epoch(dataset, "test", **changes))
    assert (images != other_images).any(axis=(1, 2, 3)).mean() > 0.9


def test_augmentation_changes_images_but_not_labels(dataset):
    plain, labels = whole(epoch(dataset, augment=False))
    augmented, augmented_labels = whole(epoch(dataset))
    np.testing.assert_array_equal(labels, augmented_labels)
    assert (plain != augmented).any(axis=(1, 2, 3)).mean() > 0.9


def test_augmentation_of_an_example_does_not_depend_on_the_batch(dataset):
    for small, large in zip(
        whole(epoch(dataset, batch_size=37)), whole(epoch(dataset, batch_size=8000)), strict=True
    ):
        np.testing.assert_array_equal(small, large)


def test_pad_crop_flip_equals_a_loop():
    rng = np.random.default_rng(0)
    images = rng.integers(1, 256, (50, 6, 5, 3), np.uint8)
    offsets = rng.integers(0, 4, size=(50, 2), endpoint=True)
    flips = rng.random(50) < 0.5
    padded = np.zeros((50, 10, 9, 3), np.uint8)
    padded[:, 2:8, 2:7] = images
    result = pad_crop_flip(images, offsets, flips, pad=2)
    for image, (top, left), flip, cropped in zip(padded, offsets, flips, result, strict=True):
        expected = image[top : top + 6, left : left + 5]
        np.testing.assert_array_equal(cropped, expected[:, ::-1] if flip else expected)


def test_every_offset_and_both_flips_are_drawn(dataset):
    white = data.InMemory(np.full((2000, 8, 8, 1), 255, np.uint8), np.zeros(2000, np.int32))
    (batch,) = white.read(np.arange(2000), 2000, augmentation=(0, 0))
    rows = (batch.images[..., 0] > 0).any(axis=2).sum(axis=1)
    columns = (batch.images[..., 0] > 0).any(axis=1).sum(axis=1)
    assert set(rows) == set(columns) == {4, 5, 6, 7, 8}  # shifted by up to 4 pixels
    half_white = data.InMemory(np.zeros((2000, 8, 8, 1), np.uint8), np.zeros(2000, np.int32), pad=0)
    half_white.images[:, :, :4] = 255
    (batch,) = half_white.read(np.arange(2000), 2000, augmentation=(0, 0))
    assert 0.45 < (batch.images[:, 0, 0, 0] == 0).mean() < 0.55  # 0.5 within 4.5 sigma


@pytest.mark.parametrize(
    ("drop_remainder", "sizes"), [(True, [3000, 3000]), (False, [3000, 3000, 2000])]
)
def test_remainder(dataset, drop_remainder, sizes):
    batches = epoch(dataset, batch_size=3000, drop_remainder=drop_remainder)
    assert [len(batch.labels) for batch in batches] == sizes
    assert dataset.num_batches("train", 3000, drop_remainder=drop_remainder) == len(sizes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size=0: expected 1 to 8000"),
        ({"batch_size": -5}, "batch_size=-5: expected 1 to 8000"),
        ({"batch_size": 8001}, "batch_size=8001: expected 1 to 8000"),
        ({"split": "test", "batch_size": 2001}, "batch_size=2001: expected 1 to 2000"),
        ({"split": "validation"}, "split='validation': expected 'train' or 'test'"),
        ({"start_batch": -1}, "start_batch=-1: expected 0 to 8"),
        ({"start_batch": 9}, "start_batch=9: expected 0 to 8"),
        ({"seed": -1}, "seed=-1: expected 0 or more"),
        ({"epoch": -1}, "epoch=-1: expected 0 or more"),
    ],
)
def test_bad_argument_is_an_error_at_the_call(dataset, changes, message):
    arguments = {"split": "train", "batch_size": 1000, "seed": 0, "epoch": 0}
    with pytest.raises(ValueError, match=message):
        dataset.batches(**arguments | changes, augment=False, drop_remainder=True)


def test_unknown_name_lists_the_names():
    names = "fashion_mnist_embedded, fashion_mnist, cifar10, cifar100, imagenet2012"
    with pytest.raises(ValueError, match=f"name='mnist': expected one of {names}"):
        data.load("mnist")


def test_data_dir_is_not_for_the_embedded_data_set(tmp_path):
    with pytest.raises(ValueError, match=r"data_dir=.*expected None for fashion_mnist_embedded"):
        data.load("fashion_mnist_embedded", tmp_path)


@pytest.mark.parametrize("module", ["tensorflow_datasets", "grain"])
def test_missing_extra_is_named(monkeypatch, tmp_path, module):
    monkeypatch.setitem(sys.modules, module, None)
    for name in ("experiments.data.tfds_source", "experiments.data.imagenet"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr("experiments.data.tfds_source", raising=False)
    with pytest.raises(ModuleNotFoundError, match=rf"needs {module}: .*jaxcomp\[train\]"):
        data.load("cifar10", tmp_path)
