"""Evaluates the backward pass of a masked attention without the keys that its mask hides."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jaxcomp._core.shard_map import barrier_by_type, vary_like
from jaxcomp.transform._pieces.axes import Axes, WholeError
from jaxcomp.transform._pieces.hidden import Chunk, Scores, State, state_of
from jaxcomp.transform._pieces.limits import Limits
from jaxcomp.transform._pieces.masks import masked_scores
from jaxcomp.transform._pieces.slice import wide
from jaxcomp.transform._pieces.slices import Evaluate, largest_size
from jaxcomp.transform._program.constants import constants, evaluated, part_of
from jaxcomp.transform._program.program import Program, apply, avals, evaluate, is_placed
from jaxcomp.transform._program.types import Atom, Equation, Variable, is_variable

_CHUNKS = 4
_SIZES = {"broadcast_in_dim": "shape", "reshape": "new_sizes"}  # the parameter with the shape
_WORTH = 0.8  # of the scores are evaluated, at most


def in_chunks(
    program: Program, evaluate: Callable[[Program], Evaluate], limits: Limits
) -> Evaluate | None:
    """Evaluates a program in chunks of the queries of its attention, without hidden keys.

    A causal mask hides 3 of 8 blocks of scores if there are four chunks. What is hidden is 0 in all
    products and sums over keys, so the results are the same, to rounding. Results that are sums
    over queries are added in float32.

    Args:
        program: A flat program, such as the backward pass of an inner `jax.checkpoint`.
        evaluate: What evaluates the program of a chunk.
        limits: Sizes of chunks.

    Returns:
        A function from the cotangent and the program's arguments to its results; None if the
        program has no mask that is known, or needs all keys or queries at once.
    """
    if largest_size(program) < limits.scores or program.jaxpr.effects:
        return None
    try:
        masked = _Masked(program, limits)
        parts = [(chunk, evaluate(masked.part(chunk))) for chunk in masked.chunks]
    except WholeError:
        return None
    return functools.partial(_run, masked, parts)


def _run(
    masked: "_Masked",
    parts: list[tuple[Chunk, Evaluate]],
    cotangent: Array,
    arguments: Sequence[Array],
) -> list[Array]:
    """Returns the results, chunk after chunk, from the one with the most keys on."""
    dtypes = [kind.dtype for kind in avals(masked.program.results)]
    made: list[Array] | None = None
    for chunk, run in parts:
        given = list(arguments)
        if made is not None:
            given, made = barrier_by_type((given, made))
        found = run(cotangent, masked.arguments(chunk, given))
        made = masked.added(chunk, made, found)
    assert made is not None
    return [x.astype(dtype) for x, dtype in zip(made, dtypes, strict=True)]


class _Masked:
    """A program with scores of which a constant mask hides some.

    Attributes:
        program: The program.
        chunks: Its chunks, those with the most keys first.

    Args:
        program: A flat program.
        limits: Sizes of chunks.

    Raises:
        WholeError: If it has no such scores.
    """

    def __init__(self, program: Program, limits: Limits) -> None:
        self.program = program
        self._values = evaluated(program)
        scores, (queries, keys), hidden = masked_scores(program, self._values)
        self.chunks = _chunks(hidden, limits.queries)
        if any(map(is_placed, program.equations)):
            raise WholeError("an array is placed")
        self._constants = constants(program)
        others = [e for e in program.equations if self._constants.isdisjoint(e.outvars)]
        self._scores = Scores(Axes(others), scores, queries, keys)

    def part(self, chunk: Chunk) -> Program:
        """Returns the program of a chunk, of parts of its arguments."""
        kinds = [v.aval.update(shape=self._shape(v, chunk)) for v in self.program.arguments]
        return Program.trace(lambda *given: self._evaluate(chunk, given), *kinds)

    def arguments(self, chunk: Chunk, arguments: Sequence[Array]) -> list[Array]:
        """Returns the parts of the program's arguments that a chunk reads."""
        pairs = zip(self.program.arguments, arguments, strict=True)
        return [self._sliced(chunk, v, x) for v, x in pairs]

    def added(self, chunk: Chunk, made: list[Array] | None, found: list[Array]) -> list[Array]:
        """Returns the results with those of a chunk: set for its queries, added for its keys."""
        results = []
        kinds = avals(self.program.results)
        for i, (variable, kind, part) in enumerate(
            zip(self.program.results, kinds, found, strict=True)
        ):
            rows, columns = self._scores.along(variable)
            summed = rows is None
            if summed:
                part = part.astype(wide(part.dtype))
            zeros = jnp.zeros(kind.shape, part.dtype)
            whole = vary_like(zeros, part) if made is None else made[i]
            axis, within = (columns, chunk.keys) if summed else (rows, chunk.queries)
            if axis is None:
                results.append(whole + part)
                continue
            if summed:
                part = part + lax.slice_in_dim(whole, within.start, within.stop, axis=axis)
            results.append(lax.dynamic_update_slice_in_dim(whole, part, within.start, axis))
        return results

    def _ranges(self, variable: Any, chunk: Chunk) -> list[slice]:
        """Returns what of a variable a chunk reads, along each axis."""
        found = [slice(0, size) for size in variable.aval.shape]
        for axis, within in zip(self._scores.along(variable), chunk, strict=True):
            if axis is not None:
                found[axis] = within
        return found

    def _shape(self, variable: Any, chunk: Chunk) -> tuple[int, ...]:
        return tuple(r.stop - r.start for r in self._ranges(variable, chunk))

    def _sliced(self, chunk: Chunk, variable: Any, x: Any) -> Any:
        ranges = self._ranges(variable, chunk)
        return lax.slice(x, [r.start for r in ranges], [r.stop for r in ranges])

    def _evaluate(self, chunk: Chunk, arguments: Sequence[Array]) -> list[Array]:
        states = dict.fromkeys([*self.program.constants, *self.program.arguments], State())
        parts: dict[Variable, Array] = {}  # of constants

        def part(atom: Atom, value: Any) -> Any:
            if not is_variable(atom) or atom not in self._constants:
                return value
            if atom not in parts:
                parts[atom] = part_of(self.program, atom, self._ranges(atom, chunk))
            return parts[atom]

        def step(equation: Equation, operands: list[Any]) -> list[Any]:
            if not self._constants.isdisjoint(equation.outvars):
                return [None] * len(equation.outvars)  # made where it is read
            state = state_of(equation, states, self._values, self._scores, chunk)
            states.update(dict.fromkeys(equation.outvars, state))
            return self._apply(equation, list(map(part, equation.invars, operands)), chunk)

        results = evaluate(self._with_slices(chunk), arguments, step)
        for variable in self.program.results:
            if not is_variable(variable) or variable in self._constants:
                raise WholeError("a result is a constant")
            state, (rows, columns) = states[variable], self._scores.along(variable)
            is_part = rows is not None and columns is None and not state.summed
            known = columns is None or state.zero or self._scores.all_keys(chunk)
            is_sum = rows is None and state.summed and known
            if not is_part and not is_sum:
                raise WholeError(f"{variable.aval.str_short()} is no part and no sum")
        return results

    def _with_slices(self, chunk: Chunk) -> Program:
        """Returns the program, with the parts of its constant arguments that a chunk reads."""
        pairs = zip(self.program.constants, self.program.consts, strict=True)
        return Program(self.program.jaxpr, [self._sliced(chunk, v, x) for v, x in pairs])

    def _apply(self, equation: Equation, values: list[Any], chunk: Chunk) -> list[Any]:
        """Evaluates an equation for a chunk."""
        name, params = equation.primitive.name, dict(equation.params)
        out = equation.outvars[0]
        if name == "slice":
            pairs = zip(params["start_indices"], self._shape(out, chunk), strict=True)
            params["limit_indices"] = tuple(start + size for start, size in pairs)
        elif name in _SIZES:
            params[_SIZES[name]] = self._shape(out, chunk)
        return apply(equation.replace(params=params), values)


def _chunks(hidden: np.ndarray[Any, Any], queries: int) -> list[Chunk]:
    """Returns equal ranges of queries with the keys that they see, the most keys first."""
    count, keys = hidden.shape
    size = count // _CHUNKS
    if count % _CHUNKS or size < queries:
        raise WholeError(f"{count} queries")
    found = []
    for start in range(0, count, size):
        rows = ~hidden[start : start + size]
        if not rows.any(1).all():
            raise WholeError("a query sees no key")
        seen = np.flatnonzero(rows.any(0))
        first = int(seen[0]) // queries * queries
        last = min(-(-int(seen[-1] + 1) // queries) * queries, keys)
        found.append(Chunk(slice(start, start + size), slice(first, last)))
    if sum(c.keys.stop - c.keys.start for c in found) > _WORTH * _CHUNKS * keys:
        raise WholeError("few keys are hidden")
    return sorted(found, key=lambda c: c.keys.start - c.keys.stop)
