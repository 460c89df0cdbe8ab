"""Tasks, which are models with data and a loss, and their training by a strategy."""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxcomp import memory
from jaxcomp._core.modules import split_model
from jaxcomp.models import training
from jaxcomp.models._network import classification, of_parts
from jaxcomp.planning import Strategy

PEAK_RATE, WARM_UP = 5e-3, 0.1
SMOOTHING = 20  # steps of a point of a curve, which is the mean of their losses

Batches = Iterator[tuple[np.ndarray, np.ndarray]]
Variable = nnx.Variable[Any]
Loss = Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, training.Metrics]]


@dataclass(frozen=True)
class Task:
    """A model, its data and its loss.

    Attributes:
        model: Makes the model.
        train: Makes an endless iterator of batches for a seed.
        held_out: Makes the batches for validation.
        unit: Unit of the loss.
        data: Name or hash of the data.
        loss: Loss and metrics of a model, inputs and labels.
        trained: Which variables of the model are trained.
        has_accuracy: Whether the metrics have an accuracy.
    """

    model: Callable[[nnx.Rngs], nnx.Module]
    train: Callable[[int], Batches]
    held_out: Callable[[], Batches]
    unit: str
    data: str
    loss: Loss = classification
    trained: type[Variable] = nnx.Param
    has_accuracy: bool = True


class Runs:
    """The runs of a task by one strategy, whose step is compiled once."""

    def __init__(self, task: Task, spec: str, steps: int) -> None:
        self.task, self.strategy, self.steps = task, Strategy.parse(spec), steps
        schedule = optax.warmup_cosine_decay_schedule(0, PEAK_RATE, round(WARM_UP * steps), steps)
        self.optimizer = training.adamw(schedule, weight_decay=0.1)
        loss_fn, _, _ = of_parts(self.model(seed=0), task.loss, task.trained)
        self.step = training.make_train_step(loss_fn, self.optimizer, self.strategy.micro_batches)
        self.evaluate = jax.jit(
            lambda state, *batch: loss_fn(state.params, state.model_state, *batch)[1][1]
        )

    def model(self, seed: int) -> nnx.Module:
        """Makes the model of a seed and applies the strategy."""
        return self.strategy(self.task.model(nnx.Rngs(seed)))

    def start(self, seed: int) -> training.TrainState:
        """Returns the state before the first step."""
        _, params, model_state = split_model(self.model(seed), self.task.trained)
        count = jnp.zeros((), jnp.int32)
        return training.TrainState(count, params, model_state, self.optimizer.init(params))

    def train(self, seed: int) -> tuple[training.TrainState, list[float]]:
        """Returns the state after the last step, and the mean loss of each `SMOOTHING` steps."""
        state, losses = self.start(seed), []
        for batch in itertools.islice(self.task.train(seed), self.steps):
            state, metrics = self.step(state, *batch)
            losses.append(metrics.loss)
        points = self.steps // SMOOTHING
        kept = np.array(jax.device_get(losses[: points * SMOOTHING]))
        means = kept.reshape(points, SMOOTHING).mean(1)
        return state, [round(float(mean), 4) for mean in means]

    @functools.cached_property
    def report(self) -> memory.MemoryReport:
        """The memory of the step."""
        state = jax.eval_shape(lambda: self.start(seed=0))
        return memory.analyze(self.step, state, *next(self.task.train(0)))

    def run(self, seed: int) -> dict[str, Any]:
        """Returns losses, validation loss and accuracy, and the memory of the step."""
        state, losses = self.train(seed)
        unseen = [self.evaluate(state, *batch) for batch in self.task.held_out()]
        accuracy = float(np.mean([metrics.accuracy for metrics in unseen]))
        return {
            "loss": losses,
            "validation_loss": float(np.mean([metrics.loss for metrics in unseen])),
            "validation_accuracy": accuracy if self.task.has_accuracy else None,
            "declared_bytes": self.report.declared_residual_bytes,
            "temp_bytes": self.report.temp_bytes,
        }
