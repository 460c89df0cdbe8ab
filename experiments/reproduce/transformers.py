"""Trains small transformers on text and images by several strategies, with the same seeds.

    python -m experiments.reproduce.transformers --out experiments/results/transformers

`lm` is a byte-level language model of the Python language reference that is part of Python; a tenth
of it is held out. `vit` is a vision transformer on the embedded Fashion-MNIST. Both are plain Flax.
With the same seed all strategies have the same initial parameters and batches. After an interrupt
the same command resumes.
"""

import functools
import hashlib
import itertools
import json
import pydoc_data.topics
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from flax import nnx
from matplotlib.figure import Figure
from rich.progress import track

from experiments.common.options import Out, TrainedStrategies, usage_errors
from experiments.common.palette import COLORS
from experiments.common.record import describe_environment, make_folder, write_json, write_table
from experiments.comparison.paired import difference
from experiments.comparison.rows import mebibytes
from experiments.data.datasets import Dataset, load
from experiments.zoo.transformers import ViT
from jaxcomp import memory
from jaxcomp.models import training
from jaxcomp.models._lm import LM, Shape
from jaxcomp.planning import Strategy

STRATEGIES = ("plain", "remat", "transformer:bits=4", "transformer:bits=2")
LENGTH = 96  # bytes
PATCH = 4  # pixels
PEAK_RATE, WARM_UP = 5e-3, 0.1
SMOOTHING = 20  # steps of a point of a curve, which is the mean of their losses

Batches = Iterator[tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Task:
    """A model and its data.

    Attributes:
        model: Makes the model.
        train: Makes an endless iterator of batches for a seed.
        held_out: Makes the batches for validation.
        unit: Unit of the loss.
        data: Name or hash of the data.
    """

    model: Callable[[nnx.Rngs], nnx.Module]
    train: Callable[[int], Batches]
    held_out: Callable[[], Batches]
    unit: str
    data: str


def text() -> np.ndarray:
    """Returns the bytes of the language reference."""
    topics = pydoc_data.topics.topics
    return np.frombuffer("\n".join(topics[k] for k in sorted(topics)).encode(), np.uint8)


def crops(data: np.ndarray, batch: int, seed: int) -> Batches:
    """Yields random crops of the text, and the byte that follows each byte."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(data) - LENGTH, (batch, 1))
        found = data[starts + np.arange(LENGTH + 1)].astype(np.int32)
        yield found[:, :-1], found[:, 1:]


def language(batch: int = 16) -> Task:
    """Makes the task to predict the next byte of the language reference."""
    shape, data = Shape(width=96, depth=3, heads=4), text()
    train, held_out = data[: -len(data) // 10], data[-len(data) // 10 :]
    return Task(
        lambda rngs: LM(256, LENGTH, shape, dtype=jnp.float32, rngs=rngs),
        lambda seed: crops(train, batch, seed),
        lambda: itertools.islice(crops(held_out, batch, seed=0), 32),
        "nats per byte",
        hashlib.sha256(data.tobytes()).hexdigest(),
    )


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


def _epoch(data: Dataset, split: Any, batch: int, *, seed: int, epoch: int) -> Batches:
    return data.batches(split, batch, seed=seed, epoch=epoch, augment=False, drop_remainder=True)


def epochs(data: Dataset, batch: int, seed: int) -> Batches:
    """Yields batches of the training split without end, reshuffled for each epoch."""
    for epoch in itertools.count():
        yield from _epoch(data, "train", batch, seed=seed, epoch=epoch)


TASKS: dict[str, Callable[..., Task]] = {"lm": language, "vit": vision}


class Runs:
    """The runs of a task by one strategy, whose step is compiled once."""

    def __init__(self, task: Task, spec: str, steps: int) -> None:
        self.task, self.strategy, self.steps = task, Strategy.parse(spec), steps
        schedule = optax.warmup_cosine_decay_schedule(0, PEAK_RATE, round(WARM_UP * steps), steps)
        self.optimizer = training.adamw(schedule, weight_decay=0.1)
        model = self.model(seed=0)
        self.loss_fn = training.make_loss(model, label_smoothing=0.0)
        self.step = training.make_train_step(
            self.loss_fn, self.optimizer, self.strategy.micro_batches
        )
        self.evaluate = jax.jit(
            lambda state, *batch: self.loss_fn(state.params, state.model_state, *batch)[1][1]
        )

    def model(self, seed: int) -> nnx.Module:
        """Makes the model of a seed and applies the strategy."""
        return self.strategy(self.task.model(nnx.Rngs(seed)))

    def start(self, seed: int) -> training.TrainState:
        """Returns the state before the first step."""
        return training.init_state(self.model(seed), self.optimizer)

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
        return {
            "loss": losses,
            "validation_loss": float(np.mean([metrics.loss for metrics in unseen])),
            "validation_accuracy": float(np.mean([metrics.accuracy for metrics in unseen])),
            "declared_bytes": self.report.declared_residual_bytes,
            "temp_bytes": self.report.temp_bytes,
        }


def draw(runs: dict[str, list[dict[str, Any]]], unit: str, path: Path) -> None:
    """Draws the mean training loss of the seeds, with their range."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for (strategy, found), color in zip(runs.items(), COLORS, strict=False):
        curves = np.array([run["loss"] for run in found])
        at = (np.arange(curves.shape[1]) + 0.5) * SMOOTHING
        axes.plot(at, curves.mean(0), color=color, label=strategy)
        axes.fill_between(at, curves.min(0), curves.max(0), color=color, alpha=0.15, linewidth=0)
    title = "Mean training loss of the seeds, and their range"
    axes.set(xlabel="step", ylabel=f"training loss, {unit}", title=title)
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    figure.savefig(path, dpi=150)


def rows(runs: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    """Returns the table: each strategy compared with the first, seed by seed."""
    header = "strategy", "validation loss", "difference", "accuracy", "difference, points"
    table = [[*header, "declared", "XLA temp"]]
    first = next(iter(runs.values()))
    for strategy, found in runs.items():
        losses, others = ([run["validation_loss"] for run in some] for some in (found, first))
        right, others_right = (
            [100 * run["validation_accuracy"] for run in some] for some in (found, first)
        )
        table.append(
            [
                strategy,
                f"{np.mean(losses):.4f} ± {np.std(losses, ddof=1):.4f}",
                difference(losses, others, 4),
                f"{np.mean(right):.2f}% ± {np.std(right, ddof=1):.2f}%",
                difference(right, others_right),
                mebibytes(found[0]["declared_bytes"]),
                mebibytes(found[0]["temp_bytes"]),
            ]
        )
    return table


@usage_errors()
def main(
    out: Out,
    task: Annotated[
        list[str] | None, typer.Option(help="lm or vit; repeatable. Default: both.")
    ] = None,
    strategy: TrainedStrategies = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds, 2 or more.", min=2)] = 5,
    steps: Annotated[int, typer.Option(help="Training steps.", min=SMOOTHING)] = 300,
) -> None:
    """Train every strategy with every seed; write runs.json, .md and .png for each task."""
    unknown = set(task or ()) - set(TASKS)
    if unknown:
        raise typer.BadParameter(f"task={sorted(unknown)}: expected of {list(TASKS)}")
    for name in task or TASKS:
        _compare(TASKS[name](), strategy or list(STRATEGIES), seeds, steps, out / name)


def _compare(task: Task, strategies: list[str], seeds: int, steps: int, out: Path) -> None:
    make_folder(out / "runs")
    runs: dict[str, list[dict[str, Any]]] = {}
    for name in track(strategies, "training"):
        stem = re.sub(r"[^\w=]+", "_", name)
        files = [out / "runs" / f"{stem}-{seed}-{steps}.json" for seed in range(seeds)]
        missing = [seed for seed, file in enumerate(files) if not file.exists()]
        of_strategy = Runs(task, name, steps) if missing else None
        for seed in missing:
            assert of_strategy is not None
            write_json(files[seed], of_strategy.run(seed))
        runs[name] = [json.loads(file.read_text()) for file in files]
    content = describe_environment() | {"steps": steps, "data": task.data, "runs": runs}
    write_json(out / "runs.json", content)
    title = (
        f"After {steps} steps, {seeds} seeds, mean ± standard deviation, losses in {task.unit}. "
        "Difference from the first row with the same seed, with its 95% interval:"
    )
    typer.echo(write_table(out / "runs.md", title, rows(runs), content["command"]))
    draw(runs, task.unit, out / "runs.png")


if __name__ == "__main__":
    typer.run(main)
