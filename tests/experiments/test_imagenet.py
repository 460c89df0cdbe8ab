import io

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from experiments.data import datasets as data
from experiments.data.imagenet import central_crop, random_resized_crop


def jpeg(seed):
    """A blurry random picture of a random size."""
    rng = np.random.default_rng(seed)
    pixels = Image.fromarray(rng.integers(0, 256, (5, 5, 3), np.uint8))
    file = io.BytesIO()
    pixels.resize(tuple(rng.integers(230, 400, size=2).tolist())).save(file, format="JPEG")
    file.seek(0)
    return file


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """A data set that TFDS takes for imagenet2012: 12 training and 5 validation images."""

    class Builder(tfds.builder_cls("imagenet2012"), skip_registration=True):
        name = "imagenet2012"

        def _split_generators(self, dl_manager):
            return {"train": self._generate(0, 12), "validation": self._generate(100, 105)}

        def _generate(self, start, stop):
            for key in range(start, stop):
                yield key, {"image": jpeg(key), "label": key, "file_name": f"{key}.JPEG"}

    data_dir = tmp_path_factory.mktemp("tfds")
    Builder(data_dir=data_dir, file_format="array_record").download_and_prepare(
        download_dir=data_dir / "downloads"
    )
    return data.load("imagenet2012", data_dir)


def epoch(dataset, split="train", **changes):
    arguments = {"seed": 0, "epoch": 0, "augment": True, "drop_remainder": False} | changes
    return list(dataset.batches(split, 5, **arguments))


def test_shapes(dataset):
    assert (len(dataset.train), len(dataset.test)) == (12, 5)
    batches = epoch(dataset)
    assert [batch.images.shape for batch in batches] == [(n, 224, 224, 3) for n in (5, 5, 2)]
    assert all(batch.images.dtype == np.float32 for batch in batches)
    assert all(batch.labels.dtype == np.int32 for batch in batches)
    assert sorted(np.concatenate([batch.labels for batch in batches])) == list(range(12))


def test_test_images_are_central_crops(dataset):
    (batch,) = epoch(dataset, "test", augment=False)
    for image, label in zip(batch.images, batch.labels, strict=True):
        crop = np.asarray(central_crop(Image.open(jpeg(int(label)))))
        expected = (crop / 255 - dataset.mean) / dataset.std
        np.testing.assert_allclose(image, expected, atol=1e-5)


@pytest.mark.parametrize("start_batch", [0, 1, 2, 3])
def test_resumed_epoch_equals_the_unbroken_one(dataset, start_batch):
    unbroken, resumed = epoch(dataset), epoch(dataset, start_batch=start_batch)
    assert len(resumed) == 3 - start_batch
    for batch, expected in zip(resumed, unbroken[start_batch:], strict=True):
        np.testing.assert_array_equal(batch.images, expected.images)
        np.testing.assert_array_equal(batch.labels, expected.labels)


@pytest.mark.parametrize("changes", [{"seed": 1}, {"epoch": 1}, {"augment": False}])
def test_augmentation_follows_seed_and_epoch(dataset, changes):
    (batch,) = epoch(dataset, "test")
    (other,) = epoch(dataset, "test", **changes)
    np.testing.assert_array_equal(batch.labels, other.labels)  # the test split keeps its order
    assert (batch.images != other.images).any(axis=(1, 2, 3)).all()


def test_central_crop_of_an_image_that_needs_no_resizing():
    pixels = np.random.default_rng(0).integers(0, 256, (256, 512, 3), np.uint8)
    crop = np.asarray(central_crop(Image.fromarray(pixels)))
    np.testing.assert_array_equal(crop, pixels[16:240, 144:368])


@pytest.mark.parametrize("size", [(100, 300), (300, 100), (224, 224), (1000, 10)])
def test_crops_have_the_size_of_the_data_set(size):
    image = Image.new("RGB", size)
    assert central_crop(image).size == (224, 224)
    assert random_resized_crop(image, np.random.default_rng(0)).size == (224, 224)


def test_random_part_has_the_published_area_and_ratio():
    """Red grows to the right and green downwards, so a crop tells where it comes from."""
    x, y = np.meshgrid(np.linspace(0, 255, 256), np.linspace(0, 255, 256))
    image = Image.fromarray(np.stack([x, y, 0 * x], axis=-1).astype(np.uint8))
    areas, ratios, mirrored = [], [], []
    for seed in range(300):
        crop = np.asarray(random_resized_crop(image, np.random.default_rng(seed))).astype(float)
        width, height = np.ptp(crop[..., 0]) + 1, np.ptp(crop[..., 1]) + 1
        areas.append(width * height / 256**2)
        ratios.append(width / height)
        mirrored.append(crop[0, 0, 0] > crop[0, -1, 0])
    assert 0.07 < min(areas) < 0.15
    assert 0.85 < max(areas) <= 1
    assert 0.72 < min(ratios) < 0.8
    assert 1.25 < max(ratios) < 1.39
    assert 0.37 < np.mean(mirrored) < 0.63  # 0.5 within 4.5 sigma
