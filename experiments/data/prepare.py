"""Prepares the data of the experiments from the IDX files of Fashion-MNIST.

python -m experiments.data.prepare embed --source DIR

python -m experiments.data.prepare tfds --source DIR --data-dir DIR

The commands need the extra jaxcomp[train]. They do not need TensorFlow.
"""

import gzip
import io
import os
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from jaxtyping import Int, UInt8
from PIL import Image
from tensorflow_datasets.image_classification import FashionMNIST

from experiments.data.datasets import EMBEDDED_FILE

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
IDX_PREFIXES = {"train": "train", "test": "t10k"}
NUM_CLASSES = 10

app = typer.Typer(help=__doc__, add_completion=False, rich_markup_mode=None)

Source = Annotated[
    Path,
    typer.Option(
        help="Folder with the four IDX files, plain or .gz. The Debian package "
        "dataset-fashion-mnist installs them in the default folder. Without root: apt-get download "
        "dataset-fashion-mnist, dpkg -x FILE.deb DIR, then use "
        "DIR/usr/share/datasets/fashion-mnist."
    ),
]


def read_idx(path: Path) -> UInt8[np.ndarray, "..."]:
    """Reads an IDX file of unsigned bytes.

    An IDX file holds two zero bytes, the type (8 for unsigned bytes), the number of dimensions,
    each dimension as a big-endian uint32, and the values.

    Args:
        path: the file. If it does not exist, the file ``path`` + ".gz" is read.

    Returns:
        The values.

    Raises:
        FileNotFoundError: neither file exists.
        ValueError: the file is not an IDX file of unsigned bytes, or is damaged.
    """
    zipped = path.with_name(path.name + ".gz")
    if path.exists():
        content = path.read_bytes()
    elif zipped.exists():
        try:
            content = gzip.decompress(zipped.read_bytes())
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{zipped}: expected a complete gzip file: {error}") from error
    else:
        raise FileNotFoundError(f"neither {path} nor {zipped.name} is there")
    if content[:3] != b"\0\0\x08" or len(content) < 4 + 4 * content[3]:
        raise ValueError(f"{path}: expected an IDX file of unsigned bytes")
    shape = np.frombuffer(content, ">u4", count=content[3], offset=4)
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape))
    if values.size != shape.prod():
        raise ValueError(f"{path}: expected {shape.prod()} values, got {values.size}")
    return values.reshape(shape)


def read_split(
    source: Path, split: str
) -> tuple[UInt8[np.ndarray, "n 28 28"], UInt8[np.ndarray, " n"]]:
    """Reads the images and the labels of one split.

    Args:
        source: the folder of the IDX files.
        split: "train" or "test".

    Returns:
        The images, uint8 of shape (n, 28, 28), and the labels, uint8 of shape (n,).

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: the files do not hold images of 28 x 28 pixels and one label 0 to 9 for each.
    """
    prefix = IDX_PREFIXES[split]
    images = read_idx(source / f"{prefix}-images-idx3-ubyte")
    labels = read_idx(source / f"{prefix}-labels-idx1-ubyte")
    if images.shape[1:] != (28, 28) or labels.shape != images.shape[:1]:
        raise ValueError(
            f"{source}, {split}: expected images [n, 28, 28] and labels [n], "
            f"got {images.shape} and {labels.shape}"
        )
    if labels.size and labels.max() >= NUM_CLASSES:
        raise ValueError(f"{source}, {split}: expected labels 0 to 9, got {labels.max()}")
    return images, labels


def balanced_subset(
    split: str, labels: UInt8[np.ndarray, " n"], size: int, seed: int
) -> Int[np.ndarray, " size"]:
    """Chooses random examples of a split, with equally many of each class.

    Args:
        split: the name of the split, for the error message.
        labels: the labels of the split, uint8 of shape (n,).
        size: the number of examples to choose.
        seed: the seed of the choice.

    Returns:
        The indices of the examples in ascending order.

    Raises:
        ValueError: ``size`` is not a positive multiple of 10, or a class has too few examples.
    """
    per_class, rest = divmod(size, NUM_CLASSES)
    if per_class < 1 or rest:
        raise ValueError(f"{split}={size}: expected a positive multiple of {NUM_CLASSES}")
    smallest = np.bincount(labels, minlength=NUM_CLASSES).min()
    if smallest < per_class:
        raise ValueError(f"{split}={size}: expected at most {NUM_CLASSES * smallest}")
    rng = np.random.default_rng(seed)
    chosen = [
        rng.permutation(np.flatnonzero(labels == label))[:per_class] for label in range(NUM_CLASSES)
    ]
    return np.sort(np.concatenate(chosen))


def write_npz(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes arrays to an .npz file that is compressed by LZMA.

    The file is a seventh smaller than that of ``np.savez_compressed``. ``np.load`` reads it. Equal
    arrays give equal bytes. The file is replaced atomically.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with zipfile.ZipFile(partial, "w") as archive:
            for name, array in arrays.items():
                buffer = io.BytesIO()
                np.lib.format.write_array(buffer, array, allow_pickle=False)
                entry = zipfile.ZipInfo(f"{name}.npy")  # without a timestamp
                archive.writestr(entry, buffer.getvalue(), zipfile.ZIP_LZMA)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_tfds(splits: Mapping[str, tuple[np.ndarray, np.ndarray]], data_dir: Path) -> Path:
    """Writes the data set fashion_mnist of TFDS.

    TFDS writes to a temporary folder and renames it when it is complete. The images are passed as
    PNG files, because TFDS would call TensorFlow to encode an array.

    Args:
        splits: the images and the labels of each split.
        data_dir: the folder of the TFDS data sets.

    Returns:
        The folder of the data set.

    Raises:
        FileExistsError: ``data_dir`` already holds the data set.
    """

    class Builder(FashionMNIST, skip_registration=True):  # type: ignore[call-arg]
        name = "fashion_mnist"

        def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[Any]]:
            return {split: examples(*arrays) for split, arrays in splits.items()}

    builder = Builder(data_dir=data_dir, file_format="array_record")
    if builder.is_prepared():
        raise FileExistsError(f"fashion_mnist is already prepared in {builder.data_dir}")
    with tempfile.TemporaryDirectory() as downloads:  # nothing is downloaded
        builder.download_and_prepare(download_dir=downloads)
    return Path(builder.data_dir)


def examples(
    images: UInt8[np.ndarray, "n 28 28"], labels: UInt8[np.ndarray, " n"]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (key, example) pairs in the format of the TFDS builder of fashion_mnist."""
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
        png = io.BytesIO()
        Image.fromarray(image).save(png, format="PNG")
        png.seek(0)
        yield index, {"image": png, "label": int(label)}


@app.command()
def embed(
    source: Source = DEBIAN_FOLDER,
    output: Annotated[Path, typer.Option(help="The file to write.")] = EMBEDDED_FILE,
    train: Annotated[int, typer.Option(help="Training images, a multiple of 10.")] = 8000,
    test: Annotated[int, typer.Option(help="Test images, a multiple of 10.")] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the choice of images.")] = 0,
) -> None:
    """Write the small class-balanced subset that is part of the repository."""
    if not output.parent.is_dir():
        raise FileNotFoundError(
            f"output={str(output)!r}: expected a file in a folder that is there, "
            f"got the folder {output.parent}"
        )
    arrays = {}
    for split, size in (("train", train), ("test", test)):
        images, labels = read_split(source, split)
        subset = balanced_subset(split, labels, size, seed)
        arrays[f"{split}_images"] = images[subset, :, :, np.newaxis]
        arrays[f"{split}_labels"] = labels[subset]
    write_npz(output, arrays)
    typer.echo(f"{output}: {output.stat().st_size} bytes")


@app.command("tfds")
def prepare_tfds(
    data_dir: Annotated[Path, typer.Option(help="Folder of the TFDS data sets.")],
    source: Source = DEBIAN_FOLDER,
) -> None:
    """Write the TFDS data set fashion_mnist (array_record), without TensorFlow.

    Afterwards tfds.data_source("fashion_mnist", data_dir=DIR) reads it.
    """
    splits = {split: read_split(source, split) for split in IDX_PREFIXES}
    typer.echo(write_tfds(splits, data_dir))


def main() -> None:
    """Runs the command line. An invalid input exits with one line instead of a traceback."""
    try:
        app()
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
