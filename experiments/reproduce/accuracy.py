r"""Effect of compressed activations on test loss and accuracy, over many seeds.

    python -m experiments.reproduce.accuracy --data-dir data/tfds --out experiments/results/accuracy
    python -m experiments.reproduce.accuracy --network resnet14 --data-dir data/tfds \
        --out experiments/results/accuracy-resnet14
    python -m experiments.reproduce.accuracy --network resmlp_tiny --data-dir data/tfds \
        --out experiments/results/accuracy-resmlp

Trains a small network on the whole of Fashion-MNIST to the end of its schedule. All strategies of a
seed have the same initial parameters and order of the data. The tables have the difference from the
exact run of the same seed, with its 95% confidence interval. The same command resumes: runs whose
results are written are not repeated.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from flax import nnx
from rich.progress import Progress

from experiments.common.options import DataDir, Out, TrainedStrategies, usage_errors
from experiments.common.record import describe_environment, write_json, write_table
from experiments.comparison.paired import difference
from experiments.data.datasets import Dataset, load
from experiments.training.config import TrainConfig
from experiments.training.run import of_model, optimizer
from jaxcomp._core.modules import split_model
from jaxcomp.models import catalog, resnet, training
from jaxcomp.planning import Strategy


@dataclass(frozen=True)
class Network:
    """What is trained.

    Attributes:
        make: Makes the network from its keys.
        config: How it is trained.
        strategies: How its activations are saved; the first is exact.
    """

    make: Callable[[nnx.Rngs], nnx.Module]
    config: TrainConfig
    strategies: tuple[str, ...]


def _residual(depths: tuple[int, ...], width: int, rngs: nnx.Rngs) -> nnx.Module:
    """Makes a residual network for the ten classes of Fashion-MNIST."""
    options: dict[str, Any] = dict(imagenet=True, num_classes=10, in_channels=1)
    return resnet.ResNet(resnet.BasicBlock, depths, width, **options, rngs=rngs)


_CONFIG = TrainConfig(dataset="fashion_mnist", epochs=3, batch=128, augment=False)
NETWORKS = {
    "resnet8": Network(
        lambda rngs: _residual((1, 1, 1), 16, rngs),
        replace(_CONFIG, model="resnet8"),
        (
            "plain",
            "remat",
            "automatic",
            "automatic:bits=3",
            "fused:bits=2",
            "quantize:bits=2",
            "division",
            "pooling:window=2",
        ),
    ),
    "resnet14": Network(
        lambda rngs: _residual((2, 2, 2), 8, rngs),
        replace(_CONFIG, model="resnet14"),
        ("plain", "remat", "automatic", "automatic:bits=3", "pooling:window=2,sampled=true"),
    ),
    "resmlp_tiny": Network(
        lambda rngs: catalog.create(
            "resmlp_tiny", num_classes=10, image_size=28, in_channels=1, rngs=rngs
        ),
        replace(_CONFIG, model="resmlp_tiny", optimizer="adamw", lr=2e-3),
        (
            "plain",
            "remat",
            "automatic",
            "automatic:bits=3",
            "quantize:bits=2",
            "division",
            "pruning:density=0.25",
            "pruning:density=0.25,rest_bits=2",
        ),
    ),
}
FIGURES = {"test_accuracy": 100.0, "test_loss": 1.0}  # and their units


class Runs:
    """The runs of a network by one strategy, whose step is compiled once."""

    def __init__(self, network: Network, strategy: str, data: Dataset) -> None:
        self.config = replace(network.config, strategy=strategy)
        self.data = data
        self.optimizer = optimizer(self.config, data)
        self.make = lambda seed: Strategy.parse(strategy)(network.make(nnx.Rngs(seed)))
        self.run = of_model(self.make(0), self.start(0), self.config, data)
        graphdef, _, _ = split_model(self.run.model)  # in inference mode

        def evaluate(state: training.TrainState, images: Any, labels: Any) -> Any:
            logits = nnx.merge(graphdef, state.params, state.model_state)(images)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return jnp.stack([(logits.argmax(-1) == labels).sum(), losses.sum()])

        self.evaluate = jax.jit(evaluate)

    def start(self, seed: int) -> training.TrainState:
        """The state before training."""
        return training.init_state(self.make(seed), self.optimizer)

    def train(self, seed: int) -> dict[str, float]:
        """Trains from the start to the end and returns test accuracy and test loss."""
        state, config = self.start(seed), self.config
        for epoch in range(config.epochs):
            for batch in self._batches("train", seed, epoch):
                state, _ = self.run.train_step(state, *batch)
        sums = sum(self.evaluate(state, *batch) for batch in self._batches("test", 0, 0))
        accuracy, loss = np.asarray(sums) / len(self.data.test)
        return {"test_accuracy": float(accuracy), "test_loss": float(loss)}

    def _batches(self, split: Literal["train", "test"], seed: int, epoch: int) -> Any:
        size = self.config.batch if split == "train" else 500
        return self.data.batches(
            split, size, seed=seed, epoch=epoch, augment=False, drop_remainder=split == "train"
        )


@usage_errors()
def main(
    out: Out,
    network: Annotated[str, typer.Option(help=" or ".join(NETWORKS))] = "resnet8",
    strategy: TrainedStrategies = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds, from 0 on.")] = 20,
    epochs: Annotated[int, typer.Option(help="Passes over the data.")] = _CONFIG.epochs,
    dataset: Annotated[str, typer.Option(help="Name of the data set.")] = _CONFIG.dataset,
    data_dir: DataDir = None,
) -> None:
    """Train seed by seed, each by all strategies; write after every run."""
    if network not in NETWORKS:
        raise typer.BadParameter(f"network={network!r}: expected one of {[*NETWORKS]}")
    if seeds < 2:
        raise typer.BadParameter(f"seeds={seeds}: expected 2 or more")
    chosen = NETWORKS[network]
    config = replace(chosen.config, epochs=epochs, dataset=dataset)
    chosen = replace(chosen, config=config)
    strategies = list(strategy or chosen.strategies)
    path = out / "runs.json"
    rows = _read(path, config)
    data = load(config.dataset, data_dir)
    made: dict[str, Runs] = {}
    with Progress() as progress:
        task = progress.add_task("training", total=seeds * len(strategies))
        for seed in range(seeds):
            for name in strategies:
                if not any(row["strategy"] == name and row["seed"] == seed for row in rows):
                    runs = made[name] = made.get(name) or Runs(chosen, name, data)
                    started = time.perf_counter()
                    found = runs.train(seed)
                    seconds = round(time.perf_counter() - started, 1)
                    rows.append({"strategy": name, "seed": seed} | found | {"seconds": seconds})
                    content = {"config": config.to_json()} | describe_environment()
                    write_json(path, content | {"rows": rows})
                progress.advance(task)
    typer.echo(_report(rows, strategies, config, out))


def _read(path: Path, config: TrainConfig) -> list[dict[str, Any]]:
    """The runs that are finished.

    Raises:
        ValueError: If they are of another configuration.
    """
    if not path.exists():
        return []
    content = json.loads(path.read_text())
    config.check_same_run(TrainConfig.from_json(content["config"]), path)
    rows: list[dict[str, Any]] = content["rows"]
    return rows


def _report(
    rows: Sequence[dict[str, Any]], strategies: Sequence[str], config: TrainConfig, out: Path
) -> str:
    """Writes the table of the seeds that each strategy shares with the first, and returns it."""
    by_run = {(row["strategy"], row["seed"]): row for row in rows}
    title = (
        f"{config.model} on {config.dataset}, {config.epochs} epochs: mean of the seeds, and "
        f"difference from {strategies[0]} of the same seeds with its 95% interval"
    )
    header = ["strategy", "seeds"]
    header += ["test accuracy, %", "difference, points", "test loss", "difference"]
    exact_seeds = {seed for which, seed in by_run if which == strategies[0]}
    body = []
    for name in strategies:
        seeds = [seed for which, seed in by_run if which == name and seed in exact_seeds]
        cells = [name, str(len(seeds))]
        for figure, unit in FIGURES.items():
            mine, exact = (
                [unit * by_run[which, seed][figure] for seed in seeds]
                for which in (name, strategies[0])
            )
            digits = 2 if unit == 100.0 else 4
            over = "" if name == strategies[0] else difference(mine, exact, digits)
            cells += [f"{np.mean(mine):.{digits}f}", over]
        body.append(cells)
    return write_table(
        out / "accuracy.md", title + ":", [header, *body], describe_environment()["command"]
    )


if __name__ == "__main__":
    typer.run(main)
