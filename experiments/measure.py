"""Memory and step times of training steps that differ in their strategy only."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from experiments.config import TrainConfig
from experiments.data import Dataset
from experiments.devices import shard
from experiments.run import build
from jaxcomp import memory


@dataclass(frozen=True)
class Measurement:
    """What a training step of one strategy costs.

    Attributes:
        declared_residual_bytes: what the step declares to keep from its forward to its backward
            pass; of one micro-batch where there are several, as they run one after another.
        bits_per_element: declared bits for each float that the plain step declares (which counts
            the floats of JAX's own rules: about three for each convolution output, of which the
            norm declares two). The plain step's exceed a float's own by its masks.
        target: the device that the step was compiled for.
        temp_bytes: XLA's scratch memory in the compiled step, where residuals live.
        step_seconds: median time of a step.
        step_time_ratio: median, over rounds in which each strategy takes one step, of the step's time
            to the plain step's.
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
        config: of the step, all but the strategy.
        strategies: what to compare; the first must be ``plain``.
        dataset: where the batch is from.
        rounds: how many timed steps each strategy takes, in turns, so that all share the machine's
            other load.

    Raises:
        ValueError: the first strategy is not ``plain``, or ``rounds`` is less than 1.
    """
    if strategies[0] != "plain":
        raise ValueError(
            f"strategies={list(strategies)!r}: expected plain first; the others are held against it"
        )
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
    """Times steps that take turns, so that all share the machine's other load.

    Args:
        steps: each a step that returns its new state first, and its state.
        batch: what a step takes besides its state.
        rounds: timed steps of each, 1 or more, after one in which it compiles.

    Returns:
        The seconds of each step of each.
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
    """The median, over the rounds of `in_turns`, of a step's time to another's."""
    return statistics.median(t / other for t, other in zip(times, others, strict=True))
