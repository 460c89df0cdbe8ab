import gzip
import subprocess
import sys

import numpy as np
import pytest

from experiments.data import datasets as data
from experiments.data import prepare as prepare_data


def write_idx(path, array):
    header = b"\0\0\x08" + bytes([array.ndim]) + np.array(array.shape, ">u4").tobytes()
    path.with_name(path.name + ".gz").write_bytes(gzip.compress(header + array.tobytes()))


def write_split(source, prefix, images, labels):
    write_idx(source / f"{prefix}-images-idx3-ubyte", images)
    write_idx(source / f"{prefix}-labels-idx1-ubyte", labels)


@pytest.fixture
def source(tmp_path):
    """A folder as Debian's package installs it: 60 training and 30 test images of noise."""
    folder = tmp_path / "source"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for prefix, size in (("train", 60), ("t10k", 30)):
        images = rng.integers(0, 256, (size, 28, 28), np.uint8)
        write_split(folder, prefix, images, np.arange(size, dtype=np.uint8) % 10)
    return folder


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["prepare_data", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        prepare_data.main()
    return stopped.value.code


def embed(monkeypatch, source, output, *arguments):
    sizes = ("--train", 40, "--test", 20)
    return run(monkeypatch, "embed", "--source", source, "--output", output, *sizes, *arguments)


def test_embed_is_balanced_and_taken_from_the_source(monkeypatch, source, tmp_path):
    output = tmp_path / "subset.npz"
    assert embed(monkeypatch, source, output) == 0
    with np.load(output) as file:
        arrays = dict(file)
    for split, size in (("train", 40), ("test", 20)):
        images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
        assert images.shape == (size, 28, 28, 1)
        assert np.bincount(labels).tolist() == [size // 10] * 10
        all_images, all_labels = prepare_data.read_split(source, split)
        known = {i.tobytes(): label for i, label in zip(all_images, all_labels, strict=True)}
        assert [known[image.tobytes()] for image in images] == labels.tolist()
        assert len({image.tobytes() for image in images}) == size


def test_embed_gives_the_same_bytes_again(monkeypatch, source, tmp_path):
    first, second, other = (tmp_path / name for name in ("1.npz", "2.npz", "3.npz"))
    embed(monkeypatch, source, first)
    embed(monkeypatch, source, second)
    embed(monkeypatch, source, other, "--seed", 1)
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes() != other.read_bytes()


def test_embedded_file_is_read_as_embed_writes_it(monkeypatch, source, tmp_path):
    output = tmp_path / "subset.npz"
    embed(monkeypatch, source, output)
    monkeypatch.setattr(data, "EMBEDDED_FILE", output)
    dataset = data.load("fashion_mnist_embedded")
    assert (len(dataset.train), len(dataset.test)) == (40, 20)


def test_failed_write_keeps_the_old_file(tmp_path):
    output = tmp_path / "subset.npz"
    output.write_bytes(b"old")
    arrays = {"good": np.zeros(3), "bad": np.array([None])}  # only pickle could write None
    with pytest.raises(ValueError, match="pickle"):
        prepare_data.write_npz(output, arrays)
    assert [file.name for file in tmp_path.iterdir()] == ["subset.npz"]
    assert output.read_bytes() == b"old"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--train", 45), "train=45: expected a positive multiple of 10"),
        (("--train", 0), "train=0: expected a positive multiple of 10"),
        (("--test", 40), "test=40: expected at most 30"),
    ],
)
def test_bad_size(monkeypatch, source, tmp_path, arguments, message):
    output = tmp_path / "subset.npz"
    assert message in embed(monkeypatch, source, output, *arguments)
    assert not output.exists()


def test_negative_seed_names_the_option(monkeypatch, source, tmp_path, capsys):
    assert embed(monkeypatch, source, tmp_path / "subset.npz", "--seed", -1) == 2
    assert "'--seed'" in capsys.readouterr().err


def test_missing_output_folder(monkeypatch, source, tmp_path):
    output = tmp_path / "nowhere" / "subset.npz"
    message = embed(monkeypatch, source, output)
    assert "expected a file in a folder that is there" in message
    assert message.endswith(f"got the folder {output.parent}")


def test_help_names_the_extra(monkeypatch, capsys):
    assert run(monkeypatch, "--help") == 0
    assert "jaxcomp[train]" in capsys.readouterr().out


def test_missing_source(monkeypatch, tmp_path):
    message = embed(monkeypatch, tmp_path / "nowhere", tmp_path / "subset.npz")
    assert "train-images-idx3-ubyte.gz is there" in message


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "train-labels-idx1-ubyte"])
def test_plain_idx_file_is_read_too(source, name):
    zipped = source / f"{name}.gz"
    from_zipped = prepare_data.read_idx(source / name)
    (source / name).write_bytes(gzip.decompress(zipped.read_bytes()))
    zipped.unlink()
    np.testing.assert_array_equal(prepare_data.read_idx(source / name), from_zipped)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b"\x89PNG not an IDX file"), "expected an IDX file of unsigned bytes"),
        (gzip.compress(b""), "expected an IDX file of unsigned bytes"),
        (gzip.compress(b"\0\0\x08\x01\0\0\0\x05abcd"), "expected 5 values, got 4"),
        (gzip.compress(b"\0\0\x08\x01\0\0\0\x04abcd")[:-9], "expected a complete gzip file"),
        (b"plain", "expected a complete gzip file: Not a gzipped file"),
        (gzip.compress(b"")[:10] + b"\xff" * 9, "expected a complete gzip file: Error -3"),
    ],
    ids=["not-idx", "empty", "too-few-values", "cut-short", "not-gzip", "not-deflate"],
)
def test_damaged_idx_file(tmp_path, content, message):
    (tmp_path / "file.gz").write_bytes(content)
    with pytest.raises(ValueError, match=f"{tmp_path / 'file'}.*: {message}"):
        prepare_data.read_idx(tmp_path / "file")


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (np.zeros((4, 28, 28), np.uint8), np.zeros(3, np.uint8), r"got \(4, 28, 28\) and \(3,\)"),
        (np.zeros((4, 32, 32), np.uint8), np.zeros(4, np.uint8), r"expected images \[n, 28, 28\]"),
        (np.zeros((2, 28, 28), np.uint8), np.array([0, 10], np.uint8), "labels 0 to 9, got 10"),
    ],
)
def test_split_that_does_not_fit_together(tmp_path, images, labels, message):
    write_split(tmp_path, "train", images, labels)
    with pytest.raises(ValueError, match=message):
        prepare_data.read_split(tmp_path, "train")


def test_tfds_reads_what_was_prepared_without_tensorflow(source, tmp_path):
    """In a process of its own, where an import of TensorFlow by anything would be seen."""
    code = """
import sys
import numpy as np
import tensorflow_datasets as tfds
from experiments.data import datasets as data
from experiments.data import prepare as prepare_data
source, data_dir = sys.argv[1:]
sys.argv = ["prepare_data", "tfds", "--source", source, "--data-dir", data_dir]
try:
    prepare_data.main()
except SystemExit as stopped:
    assert stopped.code == 0, stopped.code
dataset = data.load("fashion_mnist", data_dir)
for split, examples in (("train", dataset.train), ("test", dataset.test)):
    direct = tfds.data_source("fashion_mnist", split=split, data_dir=data_dir, download=False)
    assert len(direct) == len(examples)
    for example, image, label in zip(direct, examples.images, examples.labels, strict=True):
        np.testing.assert_array_equal(example["image"], image)
        assert example["label"] == label
assert "tensorflow" not in sys.modules
"""
    data_dir = tmp_path / "tfds"
    subprocess.run([sys.executable, "-c", code, str(source), str(data_dir)], check=True)
    dataset = data.load("fashion_mnist", data_dir)
    for split, examples in (("train", dataset.train), ("test", dataset.test)):
        images, labels = prepare_data.read_split(source, split)
        written = {i.tobytes(): label for i, label in zip(images, labels, strict=True)}
        read = {i.tobytes(): j for i, j in zip(examples.images, examples.labels, strict=True)}
        assert read == written  # TFDS stores them in an order of its own
    batch = next(dataset.batches("train", 32, seed=0, epoch=0, augment=True, drop_remainder=True))
    assert batch.images.shape == (32, *dataset.image_shape)
    assert batch.images.dtype == np.float32
    assert batch.labels.dtype == np.int32


def test_failed_tfds_run_leaves_nothing_half_written(monkeypatch, source, tmp_path):
    def fails_after_five(images, labels):
        for key, example in enumerate(complete(images, labels)):
            if key == 5:
                raise OSError("disk on fire")
            yield example

    complete = prepare_data.examples
    data_dir = tmp_path / "tfds"
    arguments = ("tfds", "--source", source, "--data-dir", data_dir)
    monkeypatch.setattr(prepare_data, "examples", fails_after_five)
    assert "disk on fire" in run(monkeypatch, *arguments)
    assert not [path for path in data_dir.rglob("*") if path.is_file()]
    with pytest.raises(FileNotFoundError, match=r"python -m experiments\.data\.prepare tfds"):
        data.load("fashion_mnist", data_dir)

    monkeypatch.setattr(prepare_data, "examples", complete)
    assert run(monkeypatch, *arguments) == 0
    assert len(data.load("fashion_mnist", data_dir).train) == 60
    assert "already prepared" in run(monkeypatch, *arguments)


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "imagenet2012"])
def test_missing_data_set_says_how_to_get_it(tmp_path, name):
    with pytest.raises(FileNotFoundError, match=f"tfds build {name} --file_format=array_record"):
        data.load(name, tmp_path)
