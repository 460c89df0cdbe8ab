"""Evaluates the backward pass of a masked attention without the keys that its mask hides."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jaxtyping import Array

from jaxcomp.transform._axes import Axes, WholeError
from jaxcomp.transform._constants import evaluated
from jaxcomp.transform._hidden import HIDDEN, Chunk, Scores, State, state_of
from jaxcomp.transform._programs import Program, Values, apply, avals, is_placed, is_variable, read

_CHUNKS = 4
_QUERIES = 128  # of a chunk, at least; keys are taken by as many
_SCORES = 2**24  # with fewer, the kernels of a chunk are too short
_WORTH = 0.8  # of the scores are evaluated, at most

Evaluate = Callable[[Array, Sequence[Array]], list[Array]]


def in_chunks(program: Program, evaluate: Callable[[Program], Evaluate]) -> Evaluate | None:
    """Evaluates a program in chunks of the queries of its attention, without hidden keys.

    A causal mask hides 3 of 8 blocks of scores if there are four chunks. What is hidden is 0 in all
    products and sums over keys, so the results are the same, to rounding. Results that are sums
    over queries are added in float32.

    Args:
        program: A flat program, such as the backward pass of an inner `jax.checkpoint`.
        evaluate: What evaluates the program of a chunk.

    Returns:
        A function from the cotangent and the program's arguments to its results; None if the
        program has no mask that is known, or needs all keys or queries at once.
    """
    largest = max((v.aval.size for e in program.jaxpr.eqns for v in e.outvars), default=0)
    if largest < _SCORES:
        return None
    try:
        masked = _Masked(program)
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
    """The results, chunk after chunk, from the one with the most keys on."""
    dtypes = [kind.dtype for kind in avals(masked.jaxpr.outvars)]
    made: list[Array] | None = None
    for chunk, evaluate in parts:
        given = list(arguments)
        if made is not None:
            given, made = lax.optimization_barrier((given, made))
        found = evaluate(cotangent, masked.arguments(chunk, given))
        made = masked.added(chunk, made, found)
    assert made is not None
    return [x.astype(dtype) for x, dtype in zip(made, dtypes, strict=True)]


class _Masked:
    """A program with scores of which a constant mask hides some.

    Attributes:
        jaxpr: The program's.
        chunks: Its chunks, those with the most keys first.

    Args:
        program: A flat program.

    Raises:
        WholeError: If it has no such scores.
    """

    def __init__(self, program: Program) -> None:
        self.jaxpr = program.jaxpr
        self._consts = program.consts
        self._values = evaluated(self.jaxpr)
        scores, (queries, keys), hidden = self._find_mask()
        self.chunks = _chunks(hidden)
        if any(map(is_placed, self.jaxpr.eqns)):
            raise WholeError("an array is placed")
        self._scores = Scores(Axes(program), scores, queries, keys)

    def part(self, chunk: Chunk) -> Program:
        """The program of a chunk, of parts of its arguments."""
        kinds = [
            v.aval.update(shape=tuple(self._shape(v, chunk, v.aval.shape)))
            for v in self.jaxpr.invars
        ]
        return jax.make_jaxpr(lambda *given: self._evaluate(chunk, given))(*kinds)

    def arguments(self, chunk: Chunk, arguments: Sequence[Array]) -> list[Array]:
        """The parts of the program's arguments that a chunk reads."""
        pairs = zip(self.jaxpr.invars, arguments, strict=True)
        return [self._sliced(chunk, v, x) for v, x in pairs]

    def added(self, chunk: Chunk, made: list[Array] | None, found: list[Array]) -> list[Array]:
        """The results with those of a chunk: set for its queries, added for its keys."""
        results = []
        for i, (variable, part) in enumerate(zip(self.jaxpr.outvars, found, strict=True)):
            rows, columns = self._scores.along(variable)
            summed = rows is None
            if summed and part.dtype in (jnp.bfloat16, jnp.float16):
                part = part.astype(jnp.float32)
            whole = jnp.zeros(variable.aval.shape, part.dtype) if made is None else made[i]
            axis, within = (columns, chunk.keys) if summed else (rows, chunk.queries)
            if axis is None:
                results.append(whole + part)
                continue
            if summed:
                part = part + lax.slice_in_dim(whole, within.start, within.stop, axis=axis)
            results.append(lax.dynamic_update_slice_in_dim(whole, part, within.start, axis))
        return results

    def _find_mask(self) -> tuple[Any, tuple[int, ...], np.ndarray[Any, Any]]:
        """Scores, the axes of their queries and keys, and which of them are hidden."""
        for equation in self.jaxpr.eqns:
            if equation.primitive.name != "select_n":
                continue
            which, *cases = (self._value(v) for v in equation.invars)
            (scores,) = equation.outvars
            if which is None or which.dtype != bool or scores in self._values or len(cases) != 2:
                continue
            for case, value in enumerate(cases):
                axes = tuple(i for i, n in enumerate(which.shape) if n > 1)
                if value is not None and len(axes) == 2 and np.all(value <= HIDDEN):
                    return scores, axes, (which == bool(case)).squeeze()
        raise WholeError("no mask is known")

    def _value(self, atom: Any) -> Any:
        return self._values.get(atom) if is_variable(atom) else np.asarray(atom.val)

    def _shape(self, variable: Any, chunk: Chunk, shape: Sequence[int]) -> list[int]:
        found = list(shape)
        for axis, within in zip(self._scores.along(variable), chunk, strict=True):
            if axis is not None:
                found[axis] = within.stop - within.start
        return found

    def _sliced(self, chunk: Chunk, variable: Any, x: Any) -> Any:
        for axis, within in zip(self._scores.along(variable), chunk, strict=True):
            if axis is not None:
                x = lax.slice_in_dim(x, within.start, within.stop, axis=axis)
        return x

    def _evaluate(self, chunk: Chunk, arguments: Sequence[Array]) -> list[Array]:
        env: Values = {
            v: self._sliced(chunk, v, x)
            for v, x in zip(self.jaxpr.constvars, self._consts, strict=True)
        }
        env |= dict(zip(self.jaxpr.invars, arguments, strict=True))
        states = dict.fromkeys(env, State())
        for equation in self.jaxpr.eqns:
            state = state_of(equation, states, self._values, self._scores, chunk)
            states |= dict.fromkeys(equation.outvars, state)
            values = [read(env, atom) for atom in equation.invars]
            made = self._apply(equation, values, chunk)
            env |= dict(zip(equation.outvars, made, strict=True))
        for variable in self.jaxpr.outvars:
            if not is_variable(variable):
                raise WholeError("a result is a constant")
            state, (rows, columns) = states[variable], self._scores.along(variable)
            is_part = rows is not None and columns is None and not state.summed
            is_sum = rows is None and state.summed and (columns is None or state.zero)
            if not is_part and not is_sum:
                raise WholeError(f"{variable.aval.str_short()} is no part and no sum")
        return [read(env, atom) for atom in self.jaxpr.outvars]

    def _apply(self, equation: JaxprEqn, values: list[Any], chunk: Chunk) -> list[Any]:
        """Evaluates an equation for a chunk."""
        name, params = equation.primitive.name, dict(equation.params)
        out = equation.outvars[0]
        for shape in ("shape", "new_sizes"):
            if name in ("iota", "broadcast_in_dim", "reshape") and shape in params:
                params[shape] = tuple(self._shape(out, chunk, params[shape]))
        if name == "slice":
            params["limit_indices"] = tuple(self._shape(out, chunk, params["limit_indices"]))
        made = apply(self.jaxpr, equation.replace(params=params), values)
        if name == "iota":
            for axis, within in zip(self._scores.along(out), chunk, strict=True):
                if axis == params["dimension"]:
                    made = [made[0] + jnp.asarray(within.start, made[0].dtype)]
        return made


def _chunks(hidden: np.ndarray[Any, Any]) -> list[Chunk]:
    """Equal ranges of queries with the keys that they see, the most keys first."""
    count, keys = hidden.shape
    size = count // _CHUNKS
    if count % _CHUNKS or size < _QUERIES:
        raise WholeError(f"{count} queries")
    found = []
    for start in range(0, count, size):
        rows = ~hidden[start : start + size]
        if not rows.any(1).all():
            raise WholeError("a query sees no key")
        (seen,) = rows.any(0).nonzero()
        first = int(seen[0]) // _QUERIES * _QUERIES
        last = min(-(-int(seen[-1] + 1) // _QUERIES) * _QUERIES, keys)
        found.append(Chunk(slice(start, start + size), slice(first, last)))
    if sum(c.keys.stop - c.keys.start for c in found) > _WORTH * _CHUNKS * keys:
        raise WholeError("few keys are hidden")
    return sorted(found, key=lambda c: c.keys.start - c.keys.stop)
