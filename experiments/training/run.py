"""Builds the parts of a training run from its configuration: model, steps and evaluation."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.data.datasets import Dataset
from experiments.training.config import DTYPES, TrainConfig
from experiments.training.devices import abstract_batch, place, shard
from jaxcomp.models import catalog, training
from jaxcomp.planning import Strategy


class Run(NamedTuple):
    """The parts of a run: its model, its initial state and its functions."""

    model: nnx.Module
    state: training.TrainState
    loss_fn: training.LossFunction
    train_step: training.TrainStep
    eval_step: training.EvalStep


def count_epoch_steps(config: TrainConfig, dataset: Dataset) -> int:
    """Returns the number of steps of an epoch. An incomplete last batch is dropped.

    Raises:
        ValueError: If the data set has fewer whole batches than `config.epoch_steps`.
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


def learning_rate(config: TrainConfig, epoch_steps: int) -> optax.Schedule:
    """Returns the schedule: a linear warm-up from 0, then a cosine decay to 0.

    The cosine has at least the last step.
    """
    steps = config.epochs * epoch_steps
    return optax.warmup_cosine_decay_schedule(
        0.0,
        config.lr,
        warmup_steps=min(round(config.warmup_epochs * epoch_steps), steps - 1),
        decay_steps=steps,
    )


def build(config: TrainConfig, dataset: Dataset, *, fsdp: bool = False) -> Run:
    """Makes the model and the functions of a run, and traces its training step.

    With `fsdp`, parameters and optimizer are sharded over the devices.

    Raises:
        ValueError: If the model or the strategy is unknown, the batch is not a multiple of
            micro-batches x devices or is larger than the data set, or a codec of the strategy
            cannot encode one of the arrays.
    """
    strategy = Strategy.parse(config.strategy)
    strategy.check_batch(config.batch, jax.device_count())
    model = strategy(
        catalog.create(
            config.model,
            num_classes=dataset.num_classes,
            image_size=dataset.image_shape[0],
            in_channels=dataset.image_shape[-1],
            dtype=DTYPES[config.dtype],
            rngs=nnx.Rngs(config.seed),
        )
    )
    state = place(training.init_state(model, optimizer(config, dataset)), fsdp=fsdp)
    return of_model(model, state, config, dataset)


def of_model(
    model: nnx.Module, state: training.TrainState, config: TrainConfig, dataset: Dataset
) -> Run:
    """Makes the run of a given model, whose codecs may have changed since `build`.

    Raises:
        ValueError: As `build`.
    """
    loss_fn = training.make_loss(model, config.label_smoothing)
    micro_batches = Strategy.parse(config.strategy).micro_batches
    train_step = training.make_train_step(loss_fn, optimizer(config, dataset), micro_batches)
    train_step.trace(state, *abstract_batch(config.batch, dataset.image_shape))
    return Run(model, state, loss_fn, train_step, training.make_eval_step(model))


def optimizer(config: TrainConfig, dataset: Dataset) -> optax.GradientTransformation:
    schedule = learning_rate(config, count_epoch_steps(config, dataset))
    if config.optimizer == "adamw":
        return training.adamw(schedule, weight_decay=config.weight_decay)
    return training.sgd(
        schedule,
        momentum=config.momentum,
        nesterov=config.nesterov,
        weight_decay=config.weight_decay,
    )


def cross_entropy(model: nnx.Module, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Returns the mean cross-entropy of a batch, for the statistics of gradients."""
    images, labels = batch
    logits = model(images).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def evaluate(run: Run, state: training.TrainState, dataset: Dataset, batch: int) -> float:
    """Returns the accuracy on the whole test split, of which each process reads a part.

    A short batch is padded, with the label -1 that no prediction equals.
    """
    correct = 0
    parts = jax.process_count()
    read = min(batch, len(dataset.test)) // parts * parts
    batches = dataset.batches(
        "test",
        read,
        seed=0,
        epoch=0,
        augment=False,
        drop_remainder=False,
        part=jax.process_index(),
        parts=parts,
    )
    none = np.zeros((0, *dataset.image_shape), np.float32), np.zeros(0, np.int32)
    for _ in range(dataset.num_batches("test", read, drop_remainder=False)):
        images, labels = next(batches, none)
        missing = batch // parts - len(labels)
        images = np.pad(images, ((0, missing), (0, 0), (0, 0), (0, 0)))
        labels = np.pad(labels, (0, missing), constant_values=-1)
        correct += int(run.eval_step(state, *shard(images, labels)))
    return correct / len(dataset.test)
