"""Measures the bias and the noise of compressed gradients, before and after training.

    python -m experiments.bench.gradients --batch 64 --out experiments/results/gradients
    python -m experiments.bench.gradients --batch 64 --model resmlp_tiny --out OUT
    python -m experiments.bench.gradients --batch 32 --model lm --out OUT

The unit of the noise is that of SGD: the standard deviation of the exact gradient over batches of
this size. "planned:" in front of a strategy that quantizes gives each layer and rank of samples its
own bits, with the same mean (`jaxcomp.diagnostics.plan_bits`, on another batch). "allocated:bits=N"
gives each part of a model its own bits, in the bytes of `automatic:bits=N`
(`jaxcomp.planning.allocate`, on another batch).
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from flax import nnx
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter
from rich.progress import track

import jaxcomp as jc
from experiments.common.labels import label
from experiments.common.options import Add, Out, Strategies, usage_errors
from experiments.common.palette import style
from experiments.common.record import describe_environment, read_table, write_json, write_table
from experiments.data.datasets import load
from experiments.reproduce.runs import Runs, Variable
from experiments.reproduce.tasks import TASKS, epochs
from experiments.training.config import TrainConfig
from experiments.training.planning import quantized_bits
from experiments.training.run import build, count_epoch_steps, cross_entropy
from jaxcomp._core.modules import split_model
from jaxcomp.diagnostics import plan_bits
from jaxcomp.memory import declared_residual_bytes
from jaxcomp.models.training import TrainState
from jaxcomp.planning import Strategy, allocate

_EVERYWHERE = (
    *(f"quantize:bits={bits}" for bits in (1, 2, 3, 4, 8)),
    *(f"division:bits={bits}" for bits in (1, 2, 4, 8)),
)
STRATEGIES = {
    "resnet20": (
        "pooling:window=2",
        "pooling:window=4",
        *_EVERYWHERE,
        *(f"planned:quantize:bits={bits}" for bits in (2, 3, 4)),
        *(f"fused:bits={bits}" for bits in (2, 3, 4)),
        *(f"fused:bits={bits},scale_source=range" for bits in (2, 3, 4)),
    ),
    "resmlp_tiny": (
        *(f"pruning:density={density},rest_bits=2" for density in (0.1, 0.25, 0.5)),
        *_EVERYWHERE,
    ),
    **dict.fromkeys(
        TASKS,
        (
            *(f"transformer:bits={bits}" for bits in (1, 2, 3, 4, 8)),
            *(f"boundary:quantize:bits={bits}" for bits in (4, 8)),
        ),
    ),
}
PLANNED = "planned:"
ALLOCATED = "allocated:bits="
DEFAULT_STEPS = (60, 600)
CONFIG = TrainConfig(epochs=1, augment=False, warmup_epochs=0.2)
OPTIMIZER: dict[str, dict[str, Any]] = {"resmlp_tiny": {"optimizer": "adamw", "lr": 2e-3}}


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model before and after some training, and batches that it was not trained on.

    Attributes:
        model: Makes the model by a strategy.
        states: The states before training and after each number of steps.
        batch: Inputs and labels, for the gradients.
        other: Inputs and labels, to plan bits.
        loss: The loss of a model and a batch.
        trained: Which variables of the model are trained.
    """

    model: Callable[[str], nnx.Module]
    states: Sequence[TrainState]
    batch: tuple[jax.Array, jax.Array]
    other: tuple[jax.Array, jax.Array]
    loss: Callable[[nnx.Module, tuple[jax.Array, jax.Array]], jax.Array]
    trained: type[Variable]


def network(model: str, steps: Sequence[int], batch: int) -> Subject:
    """Trains a model of `jaxcomp.models.catalog` on images."""
    data = load(CONFIG.dataset)
    config = dataclasses.replace(CONFIG, model=model, batch=batch, **OPTIMIZER.get(model, {}))
    an_epoch = count_epoch_steps(config, data)
    states: list[TrainState] = []
    for count in steps:
        parts = -(-count // an_epoch)
        run = build(dataclasses.replace(config, epochs=parts, epoch_steps=count // parts), data)
        states = states or [jax.tree.map(jnp.copy, run.state)]
        state = run.state
        batches = itertools.islice(epochs(data, batch, 0), count)
        for images, labels in track(batches, "training", total=count):
            state, _ = run.train_step(state, images, labels)
        states.append(state)
    unseen, other = (jax.tree.map(jnp.asarray, next(epochs(data, batch, seed))) for seed in (1, 2))

    def in_strategy(strategy: str) -> nnx.Module:
        return build(dataclasses.replace(config, strategy=strategy), data).model

    return Subject(in_strategy, states, unseen, other, cross_entropy, nnx.Param)


def task_subject(model: str, steps: Sequence[int], batch: int) -> Subject:
    """Trains the model of a task of `experiments.reproduce.tasks`."""
    task = TASKS[model](batch)
    runs = [Runs(task, "plain", count) for count in steps]
    states = [runs[0].start(seed=0), *(run.train(seed=0)[0] for run in runs)]
    unseen, other = (jax.tree.map(jnp.asarray, next(task.train(seed))) for seed in (1, 2))

    def in_strategy(strategy: str) -> nnx.Module:
        return Strategy.parse(strategy)(task.model(nnx.Rngs(0)))

    def loss(model: nnx.Module, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        return task.loss(model, *batch)[0]

    return Subject(in_strategy, states, unseen, other, loss, task.trained)


def declared_bytes(subject: Subject, model: nnx.Module) -> int:
    """Returns the declared residual bytes of the gradient of the subject's loss."""
    graphdef, params, rest = split_model(model, subject.trained)

    def loss(params: Any, rest: Any, batch: Any) -> jax.Array:
        return subject.loss(nnx.merge(graphdef, params, rest, copy=True), batch)

    return declared_residual_bytes(loss, params, rest, subject.batch)


def in_training(subject: Subject, strategy: str, state: TrainState) -> nnx.Module:
    """Returns a model of the subject in a state of its training, coded by a row's strategy."""
    is_allocated = strategy.startswith(ALLOCATED)
    coded = subject.model("plain" if is_allocated else strategy.removeprefix(PLANNED))
    coded.train()
    nnx.update(coded, state.params, state.model_state)
    if is_allocated:
        bits = float(strategy.removeprefix(ALLOCATED))
        policy = allocate(subject.loss, coded, subject.other, bits, wrt=subject.trained)
        return jc.compress(coded, policy)
    if strategy.startswith(PLANNED):
        (budget, *_) = quantized_bits(strategy.removeprefix(PLANNED))
        planned = plan_bits(subject.loss, coded, subject.other, budget)
        jc.compress(jc.uncompress(coded), planned)
    return coded


@usage_errors()
def main(
    out: Out,
    strategy: Strategies = None,
    model: Annotated[
        str,
        typer.Option(
            help=f"resnet20, resmlp_tiny, {', '.join(TASKS)}; another model only with --strategy."
        ),
    ] = CONFIG.model,
    steps: Annotated[
        list[int] | None,
        typer.Option(help="Training steps before each further check. Default: 60 and 600."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Examples in a batch.")] = 128,
    draws: Annotated[int, typer.Option(help="Draws of the rounding noise.")] = 64,
    add: Add = False,
) -> None:
    """Check the gradient of each strategy before and after training; write after every row."""
    strategies = strategy or list(STRATEGIES.get(model, ()))
    if not strategies:
        raise typer.BadParameter(
            f"model={model!r}: expected one of {[*STRATEGIES]}, or some --strategy"
        )
    for name in strategies:
        # An unknown strategy raises before the training.
        if name.startswith(ALLOCATED):
            float(name.removeprefix(ALLOCATED))
        else:
            Strategy.parse(name.removeprefix(PLANNED))
    counts = sorted(set(steps or DEFAULT_STEPS))
    if counts[0] < 1:
        raise typer.BadParameter(f"steps={counts[0]}: expected 1 or more")
    subject = (task_subject if model in TASKS else network)(model, counts, batch)

    described = {"model": model, "batch": batch, "draws": draws, "steps": counts}
    start = subject.states[0]
    exact_bytes = declared_bytes(subject, in_training(subject, "plain", start))
    rows: list[dict[str, Any]] = []
    if add:
        rows = read_table(out / "gradients.json", described)["rows"]
    text = ""
    for name in track(strategies, "checking"):
        rows = [row for row in rows if row["row"] != name]
        for trained, state in zip((0, *counts), subject.states, strict=True):
            coded = in_training(subject, name, state)
            bits = 32 * declared_bytes(subject, coded) / exact_bytes
            report = jc.check_gradients(
                subject.loss, coded, subject.batch, draws, wrt=subject.trained
            )
            figures = {"row": name, "steps": trained, "bits": bits}
            figures |= {"noise_over_sgd": report.noise_over_sgd}
            rows.append(figures | dataclasses.asdict(report))
        text = _write(out, describe_environment() | described | {"rows": rows})
    typer.echo(text)


def _write(out: Path, content: dict[str, Any]) -> str:
    """Writes all files and returns the table."""
    command, rows, steps = content["command"], content["rows"], content["steps"][-1]
    write_json(out / "gradients.json", content)
    table = [
        ["strategy", "bits", "steps", "noise / SGD's", "bias (95% interval)", "floor", "Exact()"]
    ]
    for row in rows:
        noise, floor = f"{row['noise_over_sgd']:.3f}", f"{row['coded']['floor']:.3f}"
        control = f"{row['control']['noise']:.0e}"
        strategy_and_bits = row["row"], f"{row['bits']:.2f}", str(row["steps"])
        table.append([*strategy_and_bits, noise, _bias(row["coded"]), floor, control])
    title = (
        f"{content['model']} after a number of training steps, batch {content['batch']}, float32, "
        f"{content['draws']} draws, relative to the norm of the exact gradient. Bits: saved bits "
        "for each float that the exact model saves. Floor: the part of the mean that is noise. "
        "Exact(): the noise of the same draws without encoding."
    )
    text = write_table(out / "gradients.md", title, table, command)
    title = (
        f"Bias of each kernel's gradient after {steps} steps, relative to the norm of its exact "
        "gradient, with its 95% interval:"
    )
    write_table(out / "layers.md", title, by_layer(rows, steps), command)
    draw(rows, steps, out / "gradients.png")
    return text


def by_layer(rows: Sequence[dict[str, Any]], steps: int) -> list[list[str]]:
    """Returns a table of the trained model: a line for each kernel, a column for each strategy."""
    trained = {row["row"]: dict(row["parameters"]) for row in rows if row["steps"] == steps}
    names = [name for name in next(iter(trained.values())) if name.endswith("kernel")]
    body = [[name, *(_bias(found[name]) for found in trained.values())] for name in names]
    return [["kernel", *trained], *body]


def draw(rows: Sequence[dict[str, Any]], steps: int, path: Path) -> None:
    """Draws the noise of the trained model's gradient over saved bits; hollow points are biased.

    The number at a point is the first of its strategy's options, such as the bits of a code.
    """
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    points: dict[str, list[tuple[float, float, bool]]] = {}
    options = {}
    for row in rows:
        if row["steps"] == steps:
            variance = row["noise_over_sgd"] ** 2
            biased = row["coded"]["bias_interval"][0] > 0
            points.setdefault(family(row["row"]), []).append((row["bits"], variance, biased))
            options[row["bits"], variance] = re.sub(
                r".*?(bits|window|density)=([\d.]+).*", r"\2", row["row"]
            )
    labels = []
    for number, (name, found) in enumerate(points.items()):
        bits, variance, biased = zip(*sorted(found), strict=True)
        color, marker = style(number)
        axes.plot(bits, variance, color=color, linewidth=1)
        fill = ["white" if b else color for b in biased]
        axes.scatter(bits, variance, c=fill, edgecolors=color, marker=marker, label=name, zorder=3)
        labels += [(options[at], at, color) for at in zip(bits, variance, strict=True)]
    axes.set(
        xlabel="saved bits for each float that the exact model saves (hollow: biased)",
        ylabel="variance of the gradient / SGD's own",
        xscale="log",
        yscale="log",
        title=f"Noise of the gradient after {steps} steps",
    )
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    label(axes, labels)
    figure.savefig(path, dpi=150)


def family(strategy: str) -> str:
    """Returns a strategy's spec without the options that change the size of its codes.

    Example:
        >>> family("fused:bits=2,scale_source=range")
        'fused:scale_source=range'
    """
    return re.sub(r"(rest_|\b)(bits|window|density)=[\d.]+,?", "", strategy).rstrip(":,")


def _bias(errors: dict[str, Any]) -> str:
    low, high = errors["bias_interval"]
    return f"{errors['bias']:.3f} ({low:.3f} .. {high:.3f})"


if __name__ == "__main__":
    typer.run(main)
