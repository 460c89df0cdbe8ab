"""Evaluates the results of a program part by part along one axis of its arrays."""

import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxcomp._core.layouts import in_row_major
from jaxcomp._core.one_device import on_one
from jaxcomp._core.shard_map import barrier_by_type, vary_like
from jaxcomp.memory._flops import jaxpr_flops
from jaxcomp.transform._pieces.limits import Limits
from jaxcomp.transform._pieces.slice import Part, WholeError, wide
from jaxcomp.transform._program.program import Program, avals, variables

Evaluate = Callable[[Array, Sequence[Array]], list[Array]]


class _Division(NamedTuple):
    """How results are divided: the axis, the number of parts, and which results have parts."""

    axis: int
    parts: int
    is_cut: tuple[bool, ...]


def in_parts(program: Program, whole: Evaluate, limits: Limits) -> Evaluate:
    """Evaluates a program in parts on one device, if it computes large arrays from smaller ones.

    An attention is divided along examples or heads, and a feed-forward network with frozen weights
    along tokens. Each iteration of a loop evaluates one part. Small results, such as the gradients
    of adapters, may be sums over the parts. They are added in float32.

    Args:
        program: The program, flat.
        whole: Evaluates it as a whole, from a cotangent that it waits for and the arguments.
        limits: Sizes of the parts. If the largest array outside of this program, such as the logits
            of a large vocabulary, is at least as large as the largest one inside, the peak is
            there, and the program is evaluated as a whole. On a TPU parts take less time than the
            whole, so this is ignored.

    Returns:
        A function from the cotangent and the program's arguments to its results.
    """
    evaluate = whole
    on_tpu = dataclasses.replace(limits, slice_nbytes=limits.tpu_slice_nbytes, outside=-1)
    for platform, of_platform in ((None, limits), ("tpu", on_tpu)):
        run = _run_of_parts(program, of_platform)
        if run is not None and platform == "tpu":
            run = functools.partial(_with_groups_in_order, run)
        evaluate = evaluate if run is None else on_one(platform, run, evaluate)
    return evaluate


def _with_groups_in_order(
    evaluate: Evaluate, cotangent: Array, arguments: Sequence[Array]
) -> list[Array]:
    """Evaluates with arrays of five axes or more, such as queries in groups, in the order of rows.

    XLA for TPUs would otherwise take an order with the examples last, and copy all of the array in
    every iteration. Of four axes its own order is the better one.
    """
    return evaluate(cotangent, [in_row_major(x) if x.ndim > 4 else x for x in arguments])


def has_parts(program: Program, limits: Limits) -> bool:
    """Returns whether `in_parts` evaluates a program in parts."""
    return _run_of_parts(program, limits) is not None


def _largest_size(program: Program) -> int:
    """Returns the elements of the largest array that a program makes."""
    return max((v.aval.size for e in program.equations for v in e.outvars), default=0)


def _run_of_parts(program: Program, limits: Limits) -> Evaluate | None:
    """Evaluates a program in parts of some bytes, where that is worth it and possible."""
    largest = _largest_size(program)
    count = -(-4 * largest // limits.slice_nbytes)
    if limits.slices(largest):
        for division in _divisions(program, count, limits):
            with contextlib.suppress(WholeError):
                return _traced(program, division, limits)
    return None


def _traced(program: Program, division: _Division, limits: Limits) -> Evaluate:
    """Evaluates a program in parts.

    Raises:
        WholeError: If that is impossible or not worthwhile.
    """
    copied: set[Any] = set()
    run = functools.partial(_run, program, division, copied)
    traced = Program.trace(run, avals(program.arguments))
    if _of_products(program) < limits.ratio * sum(v.aval.size for v in copied):
        raise WholeError("arguments are large")
    if _flops(traced) > limits.work * _flops(program):
        raise WholeError("each part takes products of the whole")
    return lambda _, arguments: traced(*arguments)


def _flops(program: Program) -> float:
    flops = jaxpr_flops(program.jaxpr, "cuda")
    return math.inf if flops is None else flops


def _of_products(program: Program) -> int:
    """Returns elements of what products read and make, where larger than each argument."""
    most = max((kind.size for kind in avals(program.arguments)), default=0)
    products = [e for e in program.equations if e.primitive.name == "dot_general"]
    operands = {v for e in products for v in (*variables(e.invars), *e.outvars)}
    return sum(v.aval.size for v in operands if v.aval.size > most)


def _divisions(program: Program, count: int, limits: Limits) -> list[_Division]:
    """Returns the axes of the largest result, those with half of `count` parts or more first.

    A result is sliced if its size along the axis is that of the largest result. All others are sums
    over the parts. In a second candidate small results of equal size are sums, too: a weight may
    happen to have as many features as there are tokens.
    """
    results = avals(program.results)
    if not results:
        return []
    largest = max(results, key=lambda kind: kind.size)
    most = limits.sums * _largest_size(program)
    divisions = []
    for axis, size in enumerate(largest.shape):
        limit = min(size, limits.excess * count)
        divisors = [n for n in range(1, limit + 1) if size % n == 0]
        number = min((n for n in divisors if n >= count), default=max(divisors, default=0))
        same_size = [axis < kind.ndim and kind.shape[axis] == size for kind in results]
        large = [kind.size > min(most, largest.size - 1) for kind in results]
        for cut in dict.fromkeys([tuple(same_size), tuple(map(operator.and_, same_size, large))]):
            sums = sum(kind.size for kind, part in zip(results, cut, strict=True) if not part)
            if number > 1 and sums <= most:
                divisions.append(_Division(axis, number, cut))
    return sorted(divisions, key=lambda division: -min(2 * division.parts, count))


def _run(
    program: Program, division: _Division, copied: set[Any], arguments: Sequence[Array]
) -> list[Array]:
    """Returns the results, of which each iteration of a loop evaluates a part.

    `copied` takes the arguments that are copied in parts.
    """
    # The arrays that the parts are written to are not made before the arguments are there.
    zero = vary_like(jnp.zeros(()), arguments)
    arguments, zero = barrier_by_type((arguments, zero))
    results = avals(program.results)
    axis, count, is_cut = division

    def step(totals: list[Array], number: Array) -> tuple[list[Array], None]:
        parts = Part(program, arguments, count, number, copied)
        pairs = zip(totals, program.results, is_cut, strict=True)
        return [
            _written(whole, parts.part(v, axis), number, axis) if part else whole + parts.total(v)
            for whole, v, part in pairs
        ], None

    totals = [
        jnp.full(kind.shape, zero, kind.dtype if part else wide(kind.dtype))
        for kind, part in zip(results, is_cut, strict=True)
    ]
    totals = lax.scan(step, totals, jnp.arange(count))[0]
    return [x.astype(kind.dtype) for x, kind in zip(totals, results, strict=True)]


def _written(whole: Array, part: Array, number: Array, axis: int) -> Array:
    return lax.dynamic_update_slice_in_dim(whole, part, number * part.shape[axis], axis)
