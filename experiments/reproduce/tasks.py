"""Small tasks on data that is always there: text, images, images with noise, and adapters."""

import asyncio
import functools
import hashlib
import itertools
import pydoc_data.topics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.data.datasets import Dataset, load
from experiments.reproduce.runs import Batches, Runs, Task
from experiments.zoo.diffusion import DiffusionUNet
from experiments.zoo.steps import denoising
from experiments.zoo.transformers import ViT
from jaxcomp.models._lm import LM, Shape

LENGTH = 96  # bytes
PATCH = 4  # pixels
RANK = 8
PRETRAINING = 1_000  # steps
LANGUAGE_MODEL = Shape(width=96, depth=3, heads=4)


def text() -> np.ndarray:
    """Returns the bytes of Python's language reference."""
    topics = pydoc_data.topics.topics
    return np.frombuffer("\n".join(topics[k] for k in sorted(topics)).encode(), np.uint8)


def source() -> np.ndarray:
    """Returns the bytes of the source code of Python's package asyncio."""
    files = sorted(Path(asyncio.__file__).parent.glob("*.py"))
    return np.frombuffer(b"\n".join(file.read_bytes() for file in files), np.uint8)


def crops(data: np.ndarray, batch: int, seed: int) -> Batches:
    """Yields random crops of the text, and the byte that follows each byte."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(data) - LENGTH, (batch, 1))
        found = data[starts + np.arange(LENGTH + 1)].astype(np.int32)
        yield found[:, :-1], found[:, 1:]


def _of_bytes(
    model: Callable[[nnx.Rngs], nnx.Module], data: np.ndarray, batch: int, **options: Any
) -> Task:
    """Makes the task to predict the next byte of a text, of which a tenth is held out."""
    train, held_out = data[: -len(data) // 10], data[-len(data) // 10 :]
    return Task(
        model,
        lambda seed: crops(train, batch, seed),
        lambda: itertools.islice(crops(held_out, batch, seed=0), 32),
        "nats per byte",
        hashlib.sha256(data.tobytes()).hexdigest(),
        **options,
    )


def _language_model(rngs: nnx.Rngs) -> LM:
    return LM(256, LENGTH, LANGUAGE_MODEL, dtype=jnp.float32, rngs=rngs)


def language(batch: int = 16) -> Task:
    """Makes the task to predict the next byte of the language reference."""
    return _of_bytes(_language_model, text(), batch)


def adapters(batch: int = 16) -> Task:
    """Makes the task to adapt the trained language model to source code, by LoRA.

    The model is first trained on the language reference, by exact gradients. Then its weights are
    frozen, and adapters of all products of its blocks are trained.
    """

    @functools.cache
    def pretrained() -> Any:
        state, _ = Runs(language(), "plain", PRETRAINING).train(seed=0)
        return state.params

    def model(rngs: nnx.Rngs) -> nnx.Module:
        made = _language_model(nnx.Rngs(0))
        nnx.update(made, jax.tree.map(jnp.copy, pretrained()))  # steps donate their state
        for block in made.blocks:
            for owner, name in (
                (block.attention, "qkv"),
                (block.attention, "out"),
                (block, "up"),
                (block, "down"),
            ):
                linear = getattr(owner, name)
                sizes = linear.in_features, RANK, linear.out_features
                setattr(owner, name, nnx.LoRA(*sizes, base_module=linear, rngs=rngs))
        return made

    return _of_bytes(model, source(), batch, trained=nnx.LoRAParam)


def vision(batch: int = 64) -> Task:
    """Makes the task to classify images of the embedded Fashion-MNIST."""
    shape, data = Shape(width=64, depth=3, heads=4), load()
    height, _, channels = data.image_shape
    make = functools.partial(ViT, data.num_classes, height, PATCH, shape, channels=channels)
    return Task(
        lambda rngs: make(dtype=jnp.float32, rngs=rngs),
        lambda seed: epochs(data, batch, seed),
        lambda: _epoch(data, "test", batch, seed=0, epoch=0),
        "nats",
        data.name,
    )


def diffusion(batch: int = 32) -> Task:
    """Makes the task to predict the noise in images of Fashion-MNIST, of half the pixels."""
    data = load()
    make = functools.partial(
        DiffusionUNet,
        widths=(32, 64),
        attends=(False, True),
        channels=data.image_shape[-1],
        blocks=1,
        heads=4,
    )
    return Task(
        lambda rngs: make(rngs=rngs),
        lambda seed: _with_noise(epochs(data, batch, seed), seed),
        lambda: _with_noise(_epoch(data, "test", batch, seed=0, epoch=0), seed=0),
        "variances of the noise",
        data.name,
        loss=denoising,
        has_accuracy=False,
    )


def _with_noise(batches: Batches, seed: int) -> Batches:
    """Halves images along both axes, and replaces labels by the noise that is to be predicted."""
    rng = np.random.default_rng(seed)
    for images, _ in batches:
        count, height, width, channels = images.shape
        halved = images.reshape(count, height // 2, 2, width // 2, 2, channels).mean((2, 4))
        yield halved, rng.standard_normal(halved.shape, np.float32)


def _epoch(data: Dataset, split: Any, batch: int, *, seed: int, epoch: int) -> Batches:
    return data.batches(split, batch, seed=seed, epoch=epoch, augment=False, drop_remainder=True)


def epochs(data: Dataset, batch: int, seed: int) -> Batches:
    """Yields batches of the training split without end, reshuffled for each epoch."""
    for epoch in itertools.count():
        yield from _epoch(data, "train", batch, seed=seed, epoch=epoch)


TASKS: dict[str, Callable[..., Task]] = {
    "lm": language,
    "vit": vision,
    "diffusion": diffusion,
    "lora": adapters,
}
