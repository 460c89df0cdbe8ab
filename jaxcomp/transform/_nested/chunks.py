"""Long loops in chunks: what the iterations of a chunk stored is encoded at once.

A kernel takes some microseconds, however little it encodes. In a loop of thousands of short
iterations, kernels that encode in each of them would take longer than the loop.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array

from jaxcomp.transform._choice.choice import Stored
from jaxcomp.transform._choice.graph import plain_nbytes
from jaxcomp.transform._choice.schedule import Schedule
from jaxcomp.transform._execution.forward import encoded, seeds_of
from jaxcomp.transform._execution.rebuild import Residual
from jaxcomp.transform._pieces.limits import Limits


def chunk_length(schedule: Schedule, length: int, arguments: Sequence[Any], limits: Limits) -> int:
    """Returns how many iterations of a loop are a chunk; 1 if each encodes by itself.

    A chunk has about the square root of all iterations, and divides their number. So what a chunk
    stores as it is takes little memory.

    Args:
        schedule: Of an iteration.
        length: The number of iterations.
        arguments: What the loop reads, with the iterations on the first axis.
        limits: From which number of iterations on, and up to which bytes of one, chunks are made.
    """
    coded = [v.aval for v, how in schedule.stored.items() if how.is_noisy]
    on_host = any(how.is_on_host for how in schedule.stored.values())
    few = length < limits.loop_length
    large = sum(map(plain_nbytes, coded)) > limits.iteration_nbytes
    placed = any(jax.typeof(x).sharding.spec[:1] not in ((), (None,)) for x in arguments)
    if not coded or on_host or few or large or placed:
        return 1
    root = math.isqrt(length)
    divisors = [n for n in range(max(2, root // 2), 2 * root + 1) if length % n == 0]
    return min(divisors, key=lambda n: abs(n - root), default=1)


def as_it_is(schedule: Schedule) -> Schedule:
    """Returns the same schedule, of which nothing is encoded."""
    stored = {v: Stored() if how.codec else how for v, how in schedule.stored.items()}
    return dataclasses.replace(schedule, stored=stored)


def encoded_chunk(schedule: Schedule, stored: Residual, seeds: Array) -> Residual:
    """Encodes what the iterations of a chunk stored.

    Args:
        schedule: Of an iteration.
        stored: What they stored by `as_it_is`, with the iterations on the first axis.
        seeds: The seed of each.
    """

    def encode(stored: Residual, seed: Array) -> Residual:
        seeds = seeds_of(schedule, seed)
        pairs = enumerate(schedule.stored.values())
        return {i: encoded(how, stored[i], seeds[i]) for i, how in pairs}

    return jax.vmap(encode)(stored, seeds)


def decoded_chunk(schedule: Schedule, stored: Residual) -> Residual:
    """Returns what the iterations of a chunk stored, decoded."""

    def decode(stored: Residual) -> Residual:
        pairs = enumerate(schedule.stored.values())
        return {
            i: stored[i] if how.codec is None else tuple(map(how.codec.decode, stored[i]))
            for i, how in pairs
        }

    return jax.vmap(decode)(stored)
