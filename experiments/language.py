"""Trains a small language model of bytes on real text, several ways with the same seeds.

    python -m experiments.language --out experiments/results/language

The text is the Python language reference as it comes with Python; a tenth of it is for validation.
Each seed gives every way the same parameters and the same batches. Interrupted, the same command
goes on.
"""

import hashlib
import json
import pydoc_data.topics
import re
from collections.abc import Iterator, Sequence
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

from experiments.compare import mebibytes
from experiments.figure import COLORS
from experiments.paired import paired_difference
from experiments.record import describe_environment, make_folder, write_json, write_table
from experiments.transformers import LM, Shape
from jaxcomp import memory, training
from jaxcomp.ways import Way

WAYS = ("plain", "remat", "compress:transformer:bits=4", "compress:transformer:bits=2")
SHAPE = Shape(width=96, depth=3, heads=4)
LENGTH, BATCH = 96, 16
PEAK_RATE, WARM_UP = 5e-3, 0.1
SMOOTHING = 20  # steps whose mean a point of the curves is


def text() -> np.ndarray:
    """The bytes of the language reference."""
    topics = pydoc_data.topics.topics
    return np.frombuffer("\n".join(topics[k] for k in sorted(topics)).encode(), np.uint8)


def batches(data: np.ndarray, steps: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Crops of the text and of what follows each byte."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        starts = rng.integers(0, len(data) - LENGTH, (BATCH, 1))
        crops = data[starts + np.arange(LENGTH + 1)].astype(np.int32)
        yield crops[:, :-1], crops[:, 1:]


class Runs:
    """The runs of one way, whose step is compiled once."""

    def __init__(self, spec: str, steps: int) -> None:
        self.way, self.steps = Way.parse(spec), steps
        data = text()
        self.train, self.held_out = data[: -len(data) // 10], data[-len(data) // 10 :]
        schedule = optax.warmup_cosine_decay_schedule(0, PEAK_RATE, round(WARM_UP * steps), steps)
        self.optimizer = training.adamw(schedule, weight_decay=0.1)
        model = self.model(seed=0)
        self.loss_fn = training.make_loss(model, label_smoothing=0.0)
        self.step = training.make_train_step(self.loss_fn, self.optimizer, self.way.micro_batches)
        state = jax.eval_shape(lambda: training.init_state(model, self.optimizer))
        self.report = memory.analyze(self.step, state, *next(batches(data, 1, seed=0)))
        self.evaluate = jax.jit(lambda s, *batch: self.loss_fn(s.params, s.model_state, *batch)[0])

    def model(self, seed: int) -> nnx.Module:
        """The model of a seed, which stores as the way says."""
        return self.way(LM(256, LENGTH, SHAPE, dtype=jnp.float32, rngs=nnx.Rngs(seed)))

    def run(self, seed: int) -> dict[str, Any]:
        """The losses, in nats per byte, and what the step declares and needs."""
        state = training.init_state(self.model(seed), self.optimizer)
        losses = []
        for batch in batches(self.train, self.steps, seed):
            state, metrics = self.step(state, *batch)
            losses.append(metrics.loss)
        unseen = [self.evaluate(state, *batch) for batch in batches(self.held_out, 32, seed=0)]
        return {
            "loss": [round(float(x), 4) for x in losses],
            "validation": float(np.mean(unseen)),
            "declared_bytes": self.report.declared_residual_bytes,
            "temp_bytes": self.report.temp_bytes,
        }


def draw(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Mean training loss of the seeds, with the range that they span."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for (way, found), color in zip(runs.items(), COLORS, strict=False):
        losses = np.array([run["loss"] for run in found])
        points = losses.shape[1] // SMOOTHING
        curves = losses[:, : points * SMOOTHING].reshape(len(found), points, SMOOTHING).mean(2)
        at = (np.arange(points) + 0.5) * SMOOTHING
        axes.plot(at, curves.mean(0), color=color, label=way)
        axes.fill_between(at, curves.min(0), curves.max(0), color=color, alpha=0.15, linewidth=0)
    axes.set(xlabel="step", ylabel="training loss, nats per byte")
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    figure.savefig(path, dpi=150)


def rows(runs: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    """The table: each way beside the first, seed by seed."""
    table = [["way", "validation loss", "over the first, 95% interval", "declared", "XLA temp"]]
    first = np.array([run["validation"] for run in next(iter(runs.values()))])
    for way, found in runs.items():
        losses = np.array([run["validation"] for run in found])
        over, width = paired_difference(losses, first)
        table.append(
            [
                way,
                f"{losses.mean():.4f} ± {losses.std(ddof=1):.4f}",
                f"{over:+.4f} ± {width:.4f}",
                mebibytes(found[0]["declared_bytes"]),
                mebibytes(found[0]["temp_bytes"]),
            ]
        )
    return table


def main(
    out: Annotated[Path, typer.Option(help="Directory of the results.")],
    way: Annotated[
        list[str] | None, typer.Option(help="A row; the first is compared with.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="How many, 2 or more.", min=2)] = 5,
    steps: Annotated[int, typer.Option(min=SMOOTHING)] = 400,
) -> None:
    """Trains every way with every seed; writes language.json, .md and .png."""
    ways: Sequence[str] = way or WAYS
    make_folder(out / "runs")
    runs: dict[str, list[dict[str, Any]]] = {}
    for name in track(ways, "training"):
        stem = re.sub(r"[^\w=]+", "_", name)
        files = [out / "runs" / f"{stem}-{seed}-{steps}.json" for seed in range(seeds)]
        missing = [seed for seed, file in enumerate(files) if not file.exists()]
        of_way = Runs(name, steps) if missing else None
        for seed in missing:
            assert of_way is not None
            write_json(files[seed], of_way.run(seed))
        runs[name] = [json.loads(file.read_text()) for file in files]
    digest = hashlib.sha256(text().tobytes()).hexdigest()
    content = describe_environment() | {"steps": steps, "text_sha256": digest, "runs": runs}
    write_json(out / "language.json", content)
    title = (
        f"Losses in nats per byte after {steps} steps, {seeds} seeds, mean ± standard deviation:"
    )
    typer.echo(write_table(out / "language.md", title, rows(runs), content["command"]))
    draw(runs, out / "language.png")


if __name__ == "__main__":
    typer.run(main)
