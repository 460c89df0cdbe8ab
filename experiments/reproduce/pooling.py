"""Effect of pooled activations on convergence and feature detection (arXiv:2409.11902).

    python -m experiments.reproduce.pooling --epochs 6 --out experiments/results/pooling

Trains a ResNet exactly and with pooled convolution inputs, as `experiments.comparison.compare`
does. Then compares each network with the exact network of the same seed: the features of its layers
(centred kernel alignment), its first filters and its Grad-CAM maps. Two exact networks of different
seeds are compared as a reference.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from flax import nnx
from matplotlib.figure import Figure

from experiments.common.options import (
    Batch,
    DataDir,
    DatasetName,
    Epochs,
    Model,
    Out,
    TrainedStrategies,
    usage_errors,
)
from experiments.common.record import describe_environment, write_json, write_table
from experiments.comparison.compare import compare_seeds, run_folder
from experiments.data.datasets import Dataset, load
from experiments.training.checkpoint import Checkpoints
from experiments.training.config import TrainConfig
from experiments.training.run import build
from jaxcomp.models.resnet import ResNet
from jaxcomp.ops import value

STRATEGIES = (
    "plain",
    "remat",
    "pooling:window=2",
    "pooling:window=4",
    "pooling:window=4 @ blocks/[0-2]/.* + pooling:window=2",
    "pooling:window=2,rest_bits=4",
)
IMAGES = 256  # of the test split, on which networks are compared
HOT = 0.2  # fraction of a map with the largest values, which is compared


def trained(config: TrainConfig, folder: Path, dataset: Dataset) -> ResNet:
    """Returns the network of a finished run, in inference mode."""
    run = build(config, dataset)
    state = Checkpoints(folder / "checkpoints").load_state(run.state)
    model = run.model
    assert isinstance(model, ResNet)
    nnx.update(model, state.params, state.model_state)
    model.eval()
    return model


@nnx.jit
def features(model: ResNet, images: jax.Array) -> list[jax.Array]:
    """Returns the feature maps after the stem and after each block."""
    maps = [value(model.act(value(model.conv(images))))]
    for block in model.blocks:
        maps.append(value(block(maps[-1])))
    return maps


@nnx.jit
def grad_cam(model: ResNet, last: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the Grad-CAM map of each image (Selvaraju et al., arXiv:1610.02391, eq. 2)."""

    def score(last: jax.Array) -> jax.Array:
        logits = model.head(last.mean((1, 2)))
        return jnp.take_along_axis(logits, labels[:, None], 1).sum()

    weights = jax.grad(score)(last).mean((1, 2), keepdims=True)
    return jax.nn.relu((weights * last).sum(-1))


def alignment(a: np.ndarray, b: np.ndarray) -> float:
    """Linear centred kernel alignment of two sets of features, 0 to 1 (arXiv:1905.00414, eq. 1)."""

    def gram(x: np.ndarray) -> np.ndarray:
        x = x.reshape(len(x), -1).astype(np.float64)
        x = x - x.mean(0)
        return x @ x.T

    ga, gb = gram(a), gram(b)
    return float((ga * gb).sum() / np.sqrt((ga * ga).sum() * (gb * gb).sum()))


def overlap(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the mean intersection over union of the largest values of two sets of maps."""

    def hot(maps: np.ndarray) -> np.ndarray:
        flat = maps.reshape(len(maps), -1)
        return flat >= np.quantile(flat, 1 - HOT, axis=1, keepdims=True)

    one, two = hot(a), hot(b)
    return float(((one & two).sum(1) / (one | two).sum(1)).mean())


def against(exact: ResNet, other: ResNet, images: jax.Array, labels: jax.Array) -> dict[str, Any]:
    """Returns how close another network's features are to those of the exact one."""
    ours, theirs = features(exact, images), features(other, images)
    cams = [grad_cam(m, maps[-1], labels) for m, maps in ((exact, ours), (other, theirs))]
    return {
        "alignment": [
            alignment(np.asarray(a), np.asarray(b)) for a, b in zip(ours, theirs, strict=True)
        ],
        "grad_cam_overlap": overlap(np.asarray(cams[0]), np.asarray(cams[1])),
    }


def draw(networks: dict[str, ResNet], images: jax.Array, labels: jax.Array, path: Path) -> None:
    """Draws the first filters, maps of the first block and Grad-CAM of each network."""
    figure = Figure(figsize=(10, 2.1 * len(networks)), layout="constrained")
    panels = figure.subplots(len(networks), 5, squeeze=False)
    for row, (name, model) in zip(panels, networks.items(), strict=True):
        maps = features(model, images[:2])
        cam = np.asarray(grad_cam(model, maps[-1], labels[:2]))
        kernel = np.asarray(model.conv.kernel[...]).mean(2)
        tiles = np.pad(kernel, ((0, 1), (0, 1), (0, 0)), constant_values=np.nan)
        columns = int(np.sqrt(tiles.shape[-1]))
        tiles = np.concatenate(
            [
                np.concatenate([tiles[..., i] for i in range(j, j + columns)], 1)
                for j in range(0, columns * columns, columns)
            ]
        )
        row[0].imshow(tiles, cmap="gray")
        row[0].set_title(textwrap.fill(name, 40), fontsize=8, loc="left")
        for axes, i in zip(row[1:3], range(2), strict=True):
            axes.imshow(np.asarray(maps[1])[i].mean(-1), cmap="viridis")
        height, width = images.shape[1:3]
        for axes, i in zip(row[3:], range(2), strict=True):
            axes.imshow(np.asarray(images)[i, ..., 0], cmap="gray")
            extent = (-0.5, width - 0.5, height - 0.5, -0.5)
            axes.imshow(cam[i], cmap="inferno", alpha=0.45, extent=extent, interpolation="bilinear")
        for axes in row:
            axes.set_axis_off()
    headings = ["first filters", *["after the first block"] * 2, *["Grad-CAM"] * 2]
    for axes, heading in zip(panels[-1], headings, strict=True):
        axes.text(0.5, -0.06, heading, transform=axes.transAxes, ha="center", va="top", fontsize=8)
    figure.savefig(path, dpi=150)


@usage_errors()
def main(
    out: Out,
    strategy: TrainedStrategies = None,
    seed: Annotated[
        list[int] | None, typer.Option(help="Repeatable, two or more. Default: 0, 1, 2.")
    ] = None,
    model: Model = TrainConfig.model,
    dataset: DatasetName = TrainConfig.dataset,
    data_dir: DataDir = None,
    epochs: Epochs = TrainConfig.epochs,
    batch: Batch = TrainConfig.batch,
) -> None:
    """Train, compare and draw; the same command resumes."""
    strategies, seeds = strategy or list(STRATEGIES), seed or [0, 1, 2]
    config = TrainConfig(
        model=model, dataset=dataset, data_dir=data_dir, epochs=epochs, batch=batch
    )
    compare_seeds(config, strategies, seeds, out)
    study(config, strategies, seeds, out / "runs", out)


def study(
    config: TrainConfig, strategies: Sequence[str], seeds: Sequence[int], runs: Path, out: Path
) -> None:
    """Writes features.json, features.md and features.png of finished runs."""
    data = load(config.dataset, config.data_dir)
    read = data.batches("test", IMAGES, seed=0, epoch=0, augment=False, drop_remainder=True)
    images, labels = map(jnp.asarray, next(read))

    def network(strategy: str, seed: int) -> ResNet:
        run = replace(config, strategy=strategy, seed=seed)
        return trained(run, run_folder(runs, strategy, seed), data)

    exact = {seed: network("plain", seed) for seed in seeds}
    drawn = {"plain": exact[seeds[0]]}
    found: dict[str, list[dict[str, Any]]] = {
        "plain, another seed": [
            against(exact[a], exact[b], images, labels)
            for a, b in zip(seeds, [*seeds[1:], seeds[0]], strict=True)
        ]
    }
    for strategy in strategies[1:]:
        others = {seed: network(strategy, seed) for seed in seeds}
        drawn[strategy] = others[seeds[0]]
        found[strategy] = [against(exact[seed], others[seed], images, labels) for seed in seeds]
    content = {"config": config.to_json(), "seeds": list(seeds)} | describe_environment()
    write_json(out / "features.json", content | {"against_plain": found})
    table = [["network", "alignment: stem", "middle", "last block", "Grad-CAM overlap"]]
    for name, results in found.items():
        layers = np.array([result["alignment"] for result in results])
        cams = np.array([result["grad_cam_overlap"] for result in results])
        chosen = (*layers[:, [0, layers.shape[1] // 2, -1]].T, cams)
        table.append([name, *(f"{x.mean():.3f} ± {x.std(ddof=1):.3f}" for x in chosen)])
    title = f"Compared with the exact network of the same seed, {len(images)} test images:"
    typer.echo(write_table(out / "features.md", title, table, content["command"]))
    draw(drawn, images, labels, out / "features.png")


if __name__ == "__main__":
    typer.run(main)
