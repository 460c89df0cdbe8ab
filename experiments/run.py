"""A training run's parts, made from its configuration: the model, its steps, the evaluation."""

from typing import NamedTuple

import jax
import numpy as np
import optax
from flax import nnx

from experiments import step
from experiments.config import DTYPES, TrainConfig
from experiments.data import Dataset
from experiments.ways import Way
from jaxcomp.models import resnet


class Run(NamedTuple):
    """What a run is made of: its first state and its functions."""

    state: step.TrainState
    loss_fn: step.LossFunction
    train_step: step.TrainStep
    eval_step: step.EvalStep


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
    model = resnet.create(
        config.model,
        num_classes=dataset.num_classes,
        in_channels=dataset.image_shape[-1],
        rules=way.rules,
        remat=way.remat,
        dtype=DTYPES[config.dtype],
        rngs=nnx.Rngs(config.seed),
    )
    epoch_steps = count_epoch_steps(config, dataset)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0,
        config.lr,
        warmup_steps=round(config.warmup_epochs * epoch_steps),
        decay_steps=config.epochs * epoch_steps,
    )
    optimizer = step.sgd(
        schedule,
        momentum=config.momentum,
        nesterov=config.nesterov,
        weight_decay=config.weight_decay,
    )
    loss_fn = step.make_loss(model, config.label_smoothing)
    return Run(
        step.replicate(step.init_state(model, optimizer)),
        loss_fn,
        step.make_train_step(loss_fn, optimizer, way.micro_batches),
        step.make_eval_step(model),
    )


def evaluate(run: Run, state: step.TrainState, dataset: Dataset, batch: int) -> float:
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
        correct += int(run.eval_step(state, *step.shard(images, labels)))
    return correct / len(dataset.test)
