"""A training run's parts, made from its configuration: the model, its steps, the evaluation."""

from typing import NamedTuple

import jax
import numpy as np
import optax
from flax import nnx

from experiments.config import DTYPES, TrainConfig
from experiments.data import Dataset
from experiments.devices import replicate, shard
from jaxcomp import training
from jaxcomp.models import resnet
from jaxcomp.ways import Way


class Run(NamedTuple):
    """What a run is made of: its first state and its functions."""

    state: training.TrainState
    loss_fn: training.LossFunction
    train_step: training.TrainStep
    eval_step: training.EvalStep


def count_epoch_steps(config: TrainConfig, dataset: Dataset) -> int:
    """The steps of an epoch; a last, incomplete batch is left out.

    Raises:
        ValueError: the data set has fewer whole batches than ``config.epoch_steps``.
    """
    available = dataset.num_batches("train", config.batch, drop_remainder=True)
    if config.epoch_steps is None:
        return available
    if config.epoch_steps > available:
        raise ValueError(
            f"epoch_steps={config.epoch_steps}: expected at most {available}, the number of "
            f"batches of {config.batch} images in {dataset.name}"
        )
    return config.epoch_steps


def build(config: TrainConfig, dataset: Dataset) -> Run:
    """Makes the model and the compiled functions of a run.

    Raises:
        ValueError: the model or the way is unknown, or the batch does not divide over the way's
            micro-batches and the devices, or is larger than the data set.
    """
    way = Way.parse(config.way)
    way.check_batch(config.batch, jax.device_count())
    model = way(
        resnet.create(
            config.model,
            num_classes=dataset.num_classes,
            in_channels=dataset.image_shape[-1],
            dtype=DTYPES[config.dtype],
            rngs=nnx.Rngs(config.seed),
        )
    )
    epoch_steps = count_epoch_steps(config, dataset)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0,
        config.lr,
        warmup_steps=round(config.warmup_epochs * epoch_steps),
        decay_steps=config.epochs * epoch_steps,
    )
    optimizer = training.sgd(
        schedule,
        momentum=config.momentum,
        nesterov=config.nesterov,
        weight_decay=config.weight_decay,
    )
    loss_fn = training.make_loss(model, config.label_smoothing)
    return Run(
        replicate(training.init_state(model, optimizer)),
        loss_fn,
        training.make_train_step(loss_fn, optimizer, way.micro_batches),
        training.make_eval_step(model),
    )


def evaluate(run: Run, state: training.TrainState, dataset: Dataset, batch: int) -> float:
    """The accuracy on the whole test split.

    The last batch is filled up with images whose label, -1, no prediction equals.
    """
    correct = 0
    for images, labels in dataset.batches(
        "test", batch, seed=0, epoch=0, augment=False, drop_remainder=False
    ):
        missing = batch - len(labels)
        images = np.pad(images, ((0, missing), (0, 0), (0, 0), (0, 0)))
        labels = np.pad(labels, (0, missing), constant_values=-1)
        correct += int(run.eval_step(state, *shard(images, labels)))
    return correct / len(dataset.test)
