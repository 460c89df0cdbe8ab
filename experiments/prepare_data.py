"""Makes the data of the experiments from the IDX files of Fashion-MNIST.

python -m experiments.prepare_data embed --source DIR

python -m experiments.prepare_data tfds --source DIR --data-dir DIR

Needs the extra jaxcomp[train], but not TensorFlow.
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

from experiments.data import EMBEDDED_FILE

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
IDX_PREFIXES = {"train": "train", "test": "t10k"}
NUM_CLASSES = 10

app = typer.Typer(help=__doc__, add_completion=False, rich_markup_mode=None)

Source = Annotated[
    Path,
    typer.Option(
        help="Folder with the four IDX files, plain or .gz. Debian's package puts them into the "
        "default: apt-get install dataset-fashion-mnist; or, without root: apt-get download "
        "dataset-fashion-mnist and dpkg -x FILE.deb DIR, then DIR/usr/share/datasets/fashion-mnist."
    ),
]


def read_idx(path: Path) -> UInt8[np.ndarray, "..."]:
    """Reads an IDX file of bytes, plain or (if only ``path`` + ".gz" is there) gzipped.

    The format: two zero bytes, the type (8 for unsigned bytes), the number of dimensions, every
    dimension as a big-endian uint32, then the values.

    Raises:
        FileNotFoundError: neither file is there.
        ValueError: the file is not an IDX file of bytes, or is damaged.
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
    """Reads the images and labels of "train" or "test".

    Raises:
        ValueError: the files hold something else than 28 x 28 images and a label 0 to 9 for each.
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
    """Indices, ascending, of ``size`` random examples of a split with as many of each class.

    Raises:
        ValueError: ``size`` is no multiple of 10, or a class has too few examples.
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
    """Writes what ``np.load`` reads, packed by LZMA (a seventh smaller than ``savez_compressed``).

    The same arrays give the same bytes, and ``path`` is replaced only by a complete file.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with zipfile.ZipFile(partial, "w") as archive:
            for name, array in arrays.items():
                buffer = io.BytesIO()
                np.lib.format.write_array(buffer, array, allow_pickle=False)
                entry = zipfile.ZipInfo(f"{name}.npy")  # without the time of day
                archive.writestr(entry, buffer.getvalue(), zipfile.ZIP_LZMA)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_tfds(splits: Mapping[str, tuple[np.ndarray, np.ndarray]], data_dir: Path) -> Path:
    """Writes (images, labels) of every split as TFDS's fashion_mnist; returns its folder.

    TFDS writes into a temporary folder and renames it when complete. Images are handed over as open
    files of PNG bytes: TFDS would call TensorFlow to encode an array.

    Raises:
        FileExistsError: ``data_dir`` holds a prepared fashion_mnist already.
    """

    class Builder(FashionMNIST, skip_registration=True):  # type: ignore[call-arg]
        name = "fashion_mnist"

        def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[Any]]:
            return {split: examples(*arrays) for split, arrays in splits.items()}

    builder = Builder(data_dir=data_dir, file_format="array_record")
    if builder.is_prepared():
        raise FileExistsError(f"fashion_mnist is already prepared in {builder.data_dir}")
    with tempfile.TemporaryDirectory() as downloads:  # stays empty
        builder.download_and_prepare(download_dir=downloads)
    return Path(builder.data_dir)


def examples(
    images: UInt8[np.ndarray, "n 28 28"], labels: UInt8[np.ndarray, " n"]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (key, example) as TFDS's own builder of fashion_mnist does."""
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
    seed: Annotated[int, typer.Option(min=0, help="Of the choice of images.")] = 0,
) -> None:
    """Write the small class-balanced subset that lies in the repository."""
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
    data_dir: Annotated[Path, typer.Option(help="TFDS's folder of data sets.")],
    source: Source = DEBIAN_FOLDER,
) -> None:
    """Write fashion_mnist as TFDS itself does (array_record), without TensorFlow.

    Afterwards tfds.data_source("fashion_mnist", data_dir=DIR) reads it.
    """
    splits = {split: read_split(source, split) for split in IDX_PREFIXES}
    typer.echo(write_tfds(splits, data_dir))


def main() -> None:
    """Runs the command line; bad input ends it with one line instead of a traceback."""
    try:
        app()
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
