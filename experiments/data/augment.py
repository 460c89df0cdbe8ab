"""Normalization and the pad-crop-flip augmentation, vectorized in numpy."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float32, Int, UInt8


def generator(seed: int, epoch: int, *stream: int) -> np.random.Generator:
    """Makes a numpy generator that depends only on ``seed``, ``epoch`` and ``stream``."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(epoch, *stream)))


def normalize(
    images: UInt8[np.ndarray, "*batch h w c"], mean: Sequence[float], std: Sequence[float]
) -> Float32[np.ndarray, "*batch h w c"]:
    """Scales pixels from 0..255 to 0..1, subtracts ``mean`` and divides by ``std``.

    Args:
        images: uint8 of shape (..., height, width, channels).
        mean: the mean of each channel.
        std: the standard deviation of each channel.

    Returns:
        The normalized images, float32 of the same shape.

    Example:
        >>> normalize(np.full((1, 1, 1), 255, np.uint8), mean=(0.5,), std=(0.25,)).item()
        2.0
    """
    scale = 1 / (255 * np.asarray(std))
    shift = np.asarray(mean) / np.asarray(std)
    return images * scale.astype(np.float32) - shift.astype(np.float32)


def pad_crop_flip(
    images: UInt8[np.ndarray, "n h w c"],
    offsets: Int[np.ndarray, "n 2"],
    flips: Bool[np.ndarray, " n"],
    pad: int,
) -> UInt8[np.ndarray, "n h w c"]:
    """Pads every image with zeros, crops it back to its size and mirrors it left to right.

    This is the augmentation of CIFAR in He et al., "Deep Residual Learning for Image Recognition"
    (2015), section 4.2.

    Args:
        images: uint8 of shape (n, height, width, channels).
        offsets: the row and the column at which each crop starts in the padded image, 0 to
            ``2 * pad``, of shape (n, 2).
        flips: whether each image is mirrored, of shape (n,).
        pad: pixels of zeros to add on each side.

    Returns:
        The augmented images, of the shape of ``images``.

    Example:
        >>> image = np.array([[1, 2], [3, 4]], np.uint8).reshape(1, 2, 2, 1)
        >>> shifted = pad_crop_flip(image, np.array([[1, 2]]), np.array([False]), pad=1)
        >>> shifted[0, :, :, 0].tolist()  # one pixel to the left
        [[2, 0], [4, 0]]
    """
    height, width = images.shape[1:3]
    padded = np.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(1, 2))
    cropped = windows[np.arange(len(images)), offsets[:, 0], offsets[:, 1]]  # n c h w
    cropped[flips] = cropped[flips, :, :, ::-1]
    return np.moveaxis(cropped, 1, -1)
