"""Step times on an attached device."""

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp.planning._strategies import Strategy
from jaxcomp.planning._watched import MakeStep

_RUNS = 5


def measured_seconds(make_step: MakeStep, strategy: Strategy, batch: int) -> float:
    """Returns the median time of a step on the attached device, with zeros for its arguments.

    Args:
        make_step: The step factory.
        strategy: The strategy.
        batch: The batch size.
    """
    step, shapes = make_step(strategy, batch)
    compiled = step if hasattr(step, "lower") else jax.jit(step)
    seconds: list[float] = []
    for _ in range(_RUNS + 1):
        arguments = jax.block_until_ready(jax.tree.map(_filled, shapes))  # a step may donate them
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])  # without the compilation


def _filled(struct: Any) -> jax.Array:
    if jnp.issubdtype(struct.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), struct.shape)
    return jnp.zeros(struct.shape, struct.dtype)
