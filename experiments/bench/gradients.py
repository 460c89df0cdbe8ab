"""Bias and noise of compressed gradients on a ResNet-20, at initialisation and after training.

    python -m experiments.bench.gradients --out experiments/results/gradients

The noise is told in units of SGD's own: the standard deviation of the exact gradient over batches
of this size.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from flax import nnx
from rich.progress import track

import jaxcomp as jc
from experiments.bench.memory import Out, Ways
from experiments.config import TrainConfig
from experiments.data import load
from experiments.record import describe_environment, write_json, write_table
from experiments.run import build, cross_entropy
from jaxcomp.models import resnet
from jaxcomp.ways import Way

WAYS = (
    "pooling:window=2",
    "pooling:window=4",
    "quantize:bits=2",
    "quantize:bits=4",
    "division",
    "fused:bits=2",
    "fused:bits=3",
    "fused:bits=4",
)
CONFIG = TrainConfig(epochs=1, augment=False, warmup_epochs=0.2)


def main(
    out: Out,
    way: Ways = None,
    steps: Annotated[int, typer.Option(help="Training steps before the second look.")] = 60,
    batch: Annotated[int, typer.Option(help="Of training, and of the gradients.")] = 128,
    draws: int = 64,
) -> None:
    """Checks each way's gradient twice; writes gradients.json and gradients.md."""
    data = load(CONFIG.dataset)
    config = dataclasses.replace(CONFIG, batch=batch, epoch_steps=steps)
    batches = data.batches("train", batch, seed=0, epoch=0, augment=False, drop_remainder=True)
    run = build(config, data)
    states = [jax.tree.map(jnp.copy, run.state)]
    state = run.state
    for images, labels in track([next(batches) for _ in range(steps)], "training"):
        state, _ = run.train_step(state, images, labels)
    states.append(state)
    fresh = tuple(
        map(
            jnp.asarray,
            next(data.batches("train", batch, seed=1, epoch=0, augment=False, drop_remainder=True)),
        )
    )

    rows: list[dict[str, Any]] = []
    for name in track(way or list(WAYS), "checking"):
        model = Way.parse(name)(
            resnet.create("resnet20", num_classes=10, in_channels=1, rngs=nnx.Rngs(0))
        )
        for trained, state in zip((0, steps), states, strict=True):
            nnx.update(model, state.params, state.model_state)
            report = jc.check_gradients(cross_entropy, model, fresh, draws)
            figures = {"row": name, "steps": trained, "noise_over_sgd": report.noise_over_sgd}
            rows.append(figures | dataclasses.asdict(report))
    content = describe_environment() | {"batch": batch, "draws": draws, "rows": rows}
    write_json(out / "gradients.json", content)
    table = [["way", "training steps", "noise / SGD's", "bias (95% interval)", "Monte Carlo floor"]]
    for row in rows:
        noise, floor = f"{row['noise_over_sgd']:.3f}", f"{row['coded']['floor']:.3f}"
        table.append([row["row"], str(row["steps"]), noise, _bias(row["coded"]), floor])
    title = (
        f"ResNet-20 on {data.name}, batch {batch}, float32, {draws} draws; parts of the exact "
        "gradient's norm:"
    )
    typer.echo(write_table(out / "gradients.md", title, table, content["command"]))
    title = (
        f"Bias of each kernel's gradient after {steps} steps, as a part of the norm of its own "
        "exact gradient, with its 95% interval:"
    )
    write_table(out / "layers.md", title, by_layer(rows, steps), content["command"])


def by_layer(rows: Sequence[dict[str, Any]], steps: int) -> list[list[str]]:
    """A table with a line for each kernel and a column for each way, of a trained network."""
    trained = {row["row"]: dict(row["parameters"]) for row in rows if row["steps"] == steps}
    names = [name for name in next(iter(trained.values())) if name.endswith("kernel")]
    body = [[name, *(_bias(found[name]) for found in trained.values())] for name in names]
    return [["kernel", *trained], *body]


def _bias(errors: dict[str, Any]) -> str:
    low, high = errors["bias_interval"]
    return f"{errors['bias']:.3f} ({low:.3f} .. {high:.3f})"


if __name__ == "__main__":
    typer.run(main)
