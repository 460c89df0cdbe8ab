r"""Trains an image classifier, with its activations saved by a strategy.

    python -m experiments.training.train --model resnet20 --strategy quantize:bits=2 \
        --out runs/quantize2

Several processes train together with `--coordinator`; `--fsdp` shards the state over all devices.

Ctrl-C or SIGTERM saves a checkpoint and stops. The same command with `--resume` continues, and its
result is bit-identical to that of an uninterrupted run. On a GPU this needs
`XLA_FLAGS=--xla_gpu_deterministic_ops=true`, since some kernels add in a varying order.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import typer

from experiments.common.options import (
    Batch,
    DataDir,
    DatasetName,
    Dtype,
    Epochs,
    Model,
    usage_errors,
)
from experiments.common.record import describe_environment, write_json
from experiments.data.datasets import check_batch, load
from experiments.training.checkpoint import Checkpoints
from experiments.training.config import TrainConfig
from experiments.training.devices import shard
from experiments.training.interrupt import deferred_interrupt
from experiments.training.lock import locked
from experiments.training.monitor import Monitor, import_tensorboard
from experiments.training.planning import Planner
from experiments.training.processes import any_process, check_equal, is_first, join
from experiments.training.run import build, count_epoch_steps, evaluate
from jaxcomp.models import training

METRICS = "metrics.json"  # in the folder of a finished run
_AFTER_NON_FINITE = (
    "The last checkpoint is from before; try a smaller --lr or a longer warm-up. "
    "--allow-non-finite goes on"
)
REPORT_STEPS = 10  # steps between two reads of the metrics, which block until the device is done


@dataclass
class History:
    """The history of a run.

    Attributes:
        loss: Loss on the training batch, for each step.
        accuracy: Accuracy on the training batch, for each step.
        test_accuracy: Accuracy on the test split, for each epoch.
        seconds: Elapsed time, with compilation and evaluation.
        plans: Bits of each layer's ranks of samples, by the step at which they were planned.
    """

    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    test_accuracy: list[float] = field(default_factory=list)
    seconds: float = 0.0
    plans: dict[str, dict[str, list[int]]] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainResult:
    """The result of a run.

    Attributes:
        state: The state after the last step.
        history: The history up to the last step.
        finished: False if Ctrl-C or SIGTERM stopped the run.
    """

    state: training.TrainState
    history: History
    finished: bool


def train(
    config: TrainConfig,
    out: Path,
    *,
    resume: bool = False,
    checkpoint_steps: int | None = None,
    tensorboard: bool = False,
    fsdp: bool = False,
    allow_non_finite: bool = False,
) -> TrainResult:
    """Trains a model and writes checkpoints, metrics.json and TensorBoard scalars into `out`.

    The first Ctrl-C or SIGTERM saves a checkpoint at the current step and returns. With several
    processes each reads its part of a batch, all write the checkpoints, and the first writes all
    else.

    Args:
        config: Configuration of the run.
        out: Folder of the run.
        resume: Whether to continue from the last checkpoint in `out`.
        checkpoint_steps: Steps between two checkpoints, besides those at the end of each epoch;
            None saves no others.
        tensorboard: Whether to write TensorBoard scalars, which needs tensorboardX.
        fsdp: Whether parameters and optimizer are sharded over the devices. The result is that of
            copies but for rounding, and a run may be resumed with the other.
        allow_non_finite: Whether the run goes on with a loss or parameters that are not finite.

    Raises:
        FloatingPointError: If the loss or a parameter is not finite, unless `allow_non_finite`. The
            last checkpoint is from before.
        FileExistsError: If `out` has a run already, and `resume` is False, or one that is still
            running.
        FileNotFoundError: If `resume` is True, and `out` has no checkpoint.
        ModuleNotFoundError: If tensorboardX is not installed.
        OSError: If `out` cannot be written, or has no room for a checkpoint.
        ValueError: If an argument is wrong or differs between processes, or the checkpoint is of
            another run. Nothing is written then.
    """
    check_equal(
        {name: value for name, value in config.to_json().items() if name != "data_dir"}
        | {"resume": resume, "checkpoint_steps": checkpoint_steps, "fsdp": fsdp}
    )
    if checkpoint_steps is not None and checkpoint_steps < 1:
        raise ValueError(f"checkpoint_steps={checkpoint_steps}: expected 1 or more")
    checkpoints = Checkpoints(out / "checkpoints")
    if resume and not (out / "checkpoints").is_dir():
        raise FileNotFoundError(f"no checkpoint in {out / 'checkpoints'}")
    dataset = load(config.dataset, config.data_dir)
    run = build(config, dataset, fsdp=fsdp)
    planner = Planner(config, dataset, {})
    checkpoints.check_room(run.state)
    writer = import_tensorboard() if tensorboard and is_first() else None
    epoch_steps = count_epoch_steps(config, dataset)
    unread: list[training.Metrics] = []

    with locked(out) if is_first() else nullcontext(), contextlib.ExitStack() as stack:
        history, state = History(), run.state
        if resume:
            history = _resumed(checkpoints.load_record(), config, out)
            planner = Planner(config, dataset, history.plans)
            run = planner.restored(run)
            state = checkpoints.load_state(run.state)
        elif checkpoints.latest_step() is not None:
            raise FileExistsError(
                f"out={str(out)!r}: has a run already; pass --resume to continue it"
            )
        taken = int(state.step)
        started = time.perf_counter() - history.seconds
        interrupted = stack.enter_context(deferred_interrupt())
        monitor = stack.enter_context(
            Monitor(
                config.strategy,
                taken,
                config.epochs * epoch_steps,
                config.batch,
                # TensorBoard drops events of later steps, which a run that was stopped has written.
                writer and writer(str(out / "tensorboard"), purge_step=taken + 1),
            )
        )

        def read_metrics() -> None:
            if unread:
                losses, accuracies = zip(*jax.tree.map(float, jax.device_get(unread)), strict=True)
                unread.clear()
                if not allow_non_finite:
                    _check_losses(losses, len(history.loss))
                history.loss.extend(losses)
                history.accuracy.extend(accuracies)
                monitor.report_steps(losses, accuracies)

        def save() -> None:
            read_metrics()
            if not allow_non_finite:
                _check_parameters(state, taken)
            history.seconds = time.perf_counter() - started
            checkpoints.save(state, {"config": config.to_json(), "history": asdict(history)})

        for epoch in range(len(history.test_accuracy), config.epochs):
            position = taken - epoch * epoch_steps
            batches = dataset.batches(
                "train",
                config.batch,
                seed=config.seed,
                epoch=epoch,
                augment=config.augment,
                drop_remainder=True,
                start_batch=position,
                part=jax.process_index(),
                parts=jax.process_count(),
            )
            for images, labels in islice(batches, epoch_steps - position):
                check_batch(images, labels, dataset)
                batch = shard(images, labels)
                run = planner.planned(run, state, taken, batch)
                state, metrics = run.train_step(state, *batch)
                taken += 1
                unread.append(metrics)
                if len(unread) == REPORT_STEPS:
                    read_metrics()
                reads = jax.process_count() == 1 or not unread
                if reads and any_process(interrupted.is_set()):
                    save()
                    return TrainResult(state, history, finished=False)
                due = checkpoint_steps is not None and taken % checkpoint_steps == 0
                if due and taken % epoch_steps != 0:  # the last step of an epoch is evaluated first
                    save()
            read_metrics()
            history.test_accuracy.append(evaluate(run, state, dataset, config.batch))
            monitor.report_epoch(epoch + 1, history.test_accuracy[-1])
            save()
    result = {"config": config.to_json()} | describe_environment() | asdict(history)
    if is_first():
        write_json(out / METRICS, result)
    return TrainResult(state, history, finished=True)


def _resumed(record: dict[str, Any], config: TrainConfig, out: Path) -> History:
    """Returns the history of a checkpoint's record.

    Raises:
        ValueError: If the record is of another run, or has other fields than this version writes.
    """
    known = {field.name for field in dataclasses.fields(History)}
    try:
        there = TrainConfig.from_json(record["config"])
        if different := sorted(known ^ record["history"].keys()):
            raise ValueError(f"history: fields that are unknown or missing: {', '.join(different)}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"the record of the checkpoint in {out} is of another version: {error}; train it on "
            "with that version, or start anew in another folder"
        ) from error
    config.check_same_run(there, out)
    return History(**record["history"])


def _check_losses(losses: Sequence[float], before: int) -> None:
    """Raises a FloatingPointError if a loss is not finite."""
    for step, loss in enumerate(losses, before + 1):
        if not math.isfinite(loss):
            raise FloatingPointError(f"step {step}: the loss is {loss}. {_AFTER_NON_FINITE}")


def _check_parameters(state: training.TrainState, step: int) -> None:
    """Raises a FloatingPointError if a parameter is not finite."""
    found = jax.tree.map(lambda array: jnp.isfinite(array).all(), state.params)
    for path, is_finite in jax.tree.leaves_with_path(jax.device_get(found)):
        if not is_finite:
            name = jax.tree_util.keystr(path)
            raise FloatingPointError(
                f"step {step}: the parameter {name} is not finite. {_AFTER_NON_FINITE}"
            )


@usage_errors()
def main(
    out: Annotated[Path, typer.Option(help="Folder of the run.")],
    model: Model = TrainConfig.model,
    dataset: DatasetName = TrainConfig.dataset,
    data_dir: DataDir = None,
    strategy: Annotated[
        str,
        typer.Option(
            help="plain, remat, remat:dots, offload, accumulate:N, accumulate:N:SPEC, or the spec "
            "of a policy, such as quantize:bits=2."
        ),
    ] = TrainConfig.strategy,
    epochs: Epochs = TrainConfig.epochs,
    epoch_steps: Annotated[
        int | None, typer.Option(help="Steps of an epoch. Default: all whole batches.")
    ] = None,
    batch: Batch = TrainConfig.batch,
    optimizer: Annotated[
        Literal["sgd", "adamw"], typer.Option(help="Optimizer.")
    ] = TrainConfig.optimizer,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = TrainConfig.lr,
    warmup_epochs: Annotated[
        float, typer.Option(help="Length of the linear warm-up.")
    ] = TrainConfig.warmup_epochs,
    momentum: Annotated[float, typer.Option(help="Momentum of SGD.")] = TrainConfig.momentum,
    nesterov: Annotated[bool, typer.Option(help="Nesterov momentum.")] = TrainConfig.nesterov,
    weight_decay: Annotated[
        float, typer.Option(help="Weight decay of parameters with two or more axes.")
    ] = TrainConfig.weight_decay,
    label_smoothing: Annotated[
        float, typer.Option(help="Weight of the uniform distribution in the targets.")
    ] = TrainConfig.label_smoothing,
    augment: Annotated[bool, typer.Option(help="Augment training images.")] = TrainConfig.augment,
    dtype: Dtype = TrainConfig.dtype,
    plan_steps: Annotated[
        int | None, typer.Option(help="Steps between two plans of the bits of quantized layers.")
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of parameters, data order and augmentation.")
    ] = TrainConfig.seed,
    resume: Annotated[bool, typer.Option(help="Continue from the last checkpoint.")] = False,
    checkpoint_steps: Annotated[
        int | None, typer.Option(help="Steps between two checkpoints within an epoch.")
    ] = None,
    tensorboard: Annotated[bool, typer.Option(help="Write TensorBoard scalars.")] = True,
    fsdp: Annotated[
        bool, typer.Option("--fsdp", help="Shard parameters and optimizer over the devices.")
    ] = False,
    allow_non_finite: Annotated[
        bool,
        typer.Option(
            "--allow-non-finite", help="Go on with a loss or parameters that are not finite."
        ),
    ] = False,
    coordinator: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="The first of several processes; auto for what the cluster's environment says.",
        ),
    ] = None,
    processes: Annotated[int | None, typer.Option(help="Number of processes.")] = None,
    process_id: Annotated[int | None, typer.Option(help="Number of this one, from 0.")] = None,
) -> None:
    """Train an image classifier. Ctrl-C saves a checkpoint; --resume continues from it."""
    join(coordinator, processes, process_id)
    config = TrainConfig(
        model=model,
        dataset=dataset,
        data_dir=data_dir,
        strategy=strategy,
        epochs=epochs,
        epoch_steps=epoch_steps,
        batch=batch,
        optimizer=optimizer,
        lr=lr,
        warmup_epochs=warmup_epochs,
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=weight_decay,
        label_smoothing=label_smoothing,
        augment=augment,
        dtype=dtype,
        plan_steps=plan_steps,
        seed=seed,
    )
    try:
        result = train(
            config,
            out,
            resume=resume,
            checkpoint_steps=checkpoint_steps,
            tensorboard=tensorboard,
            fsdp=fsdp,
            allow_non_finite=allow_non_finite,
        )
    except FloatingPointError as error:
        typer.echo(error, err=True)
        raise typer.Exit(1) from None
    if not is_first():
        raise typer.Exit(0 if result.finished else 130)
    if not result.finished:
        typer.echo(f"stopped at step {int(result.state.step)}; --resume continues")
        raise typer.Exit(130)
    typer.echo(f"test accuracy {result.history.test_accuracy[-1]:.4f}")


if __name__ == "__main__":
    typer.run(main)
