"""Measures the memory and time of training steps that differ only in their strategy."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from experiments.data.datasets import Dataset
from experiments.training.config import TrainConfig
from experiments.training.devices import shard
from experiments.training.run import build
from jaxcomp import memory


@dataclass(frozen=True)
class Measurement:
    """Memory and time of the training step of one strategy.

    Attributes:
        declared_residual_bytes: Bytes that the step declares to save for its backward pass; of one
            micro-batch if there are several, since they run one after another.
        bits_per_element: Declared bits for each float that the plain step declares. JAX's own rules
            declare about three floats for each output of a convolution, two of them for the norm.
            The plain step has more bits than a float has, since it also declares masks.
        target: The device that the step was compiled for.
        temp_bytes: XLA's temporary memory of the compiled step, which holds the residuals.
        step_seconds: Median time of a step.
        step_time_ratio: Median ratio of the step's time to that of the plain step, over rounds in
            which each strategy takes one step.
    """

    declared_residual_bytes: int
    bits_per_element: float
    target: str
    temp_bytes: int | None
    step_seconds: float
    step_time_ratio: float


def measure(
    config: TrainConfig, strategies: Sequence[str], dataset: Dataset, rounds: int
) -> dict[str, Measurement]:
    """Compiles and times the training step of each strategy, on random parameters and one batch.

    Args:
        config: Configuration of the step. Its strategy is replaced.
        strategies: Specs of the strategies; the first must be `plain`.
        dataset: Data set of the batch.
        rounds: Timed steps of each strategy. The strategies take turns, so that other load on the
            machine affects all of them alike.

    Raises:
        ValueError: If the first strategy is not `plain`, or `rounds` is less than 1.
    """
    if strategies[0] != "plain":
        raise ValueError(f"strategies={list(strategies)!r}: expected plain first, to compare with")
    if rounds < 1:
        raise ValueError(f"rounds={rounds}: expected 1 or more")
    batch = shard(
        *next(
            dataset.batches(
                "train", config.batch, seed=0, epoch=0, augment=False, drop_remainder=True
            )
        )
    )
    runs = [build(replace(config, strategy=strategy), dataset) for strategy in strategies]
    reports = [memory.analyze(run.train_step, run.state, *batch) for run in runs]
    plain = runs[0].train_step.trace(runs[0].state, *batch).jaxpr
    elements = sum(
        math.prod(residual.shape)
        for residual in memory.declared_residuals(plain)
        if jnp.issubdtype(residual.dtype, jnp.floating)
    )

    seconds = in_turns([(run.train_step, run.state) for run in runs], batch, rounds)

    declared = [report.declared_residual_bytes or 0 for report in reports]
    return {
        strategy: Measurement(
            declared_residual_bytes=nbytes,
            bits_per_element=8 * nbytes / elements,
            target=report.target,
            temp_bytes=report.temp_bytes,
            step_seconds=statistics.median(times),
            step_time_ratio=ratio(times, seconds[0]),
        )
        for strategy, report, nbytes, times in zip(
            strategies, reports, declared, seconds, strict=True
        )
    }


def in_turns(
    steps: Sequence[tuple[Callable[..., Any], Any]], batch: Sequence[Any], rounds: int
) -> list[list[float]]:
    """Times steps that take turns, so that other load on the machine affects all of them alike.

    Args:
        steps: Pairs of a step, whose first result is the new state, and its state.
        batch: The other arguments of a step.
        rounds: Number of timed steps of each, 1 or more. They follow one step that compiles.

    Returns:
        For each step the seconds of its runs.
    """
    states = [state for _, state in steps]
    seconds: list[list[float]] = [[] for _ in steps]
    for turn in range(rounds + 1):
        for i, (step, _) in enumerate(steps):
            started = time.perf_counter()
            states[i] = jax.block_until_ready(step(states[i], *batch))[0]
            if turn > 0:
                seconds[i].append(time.perf_counter() - started)
    return seconds


def ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """Returns the median ratio of two steps' times, over the rounds of `in_turns`."""
    return statistics.median(t / other for t, other in zip(times, others, strict=True))
