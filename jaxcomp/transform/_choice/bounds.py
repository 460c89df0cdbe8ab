"""Bounds of elementwise functions of one narrow array, found by trying every number."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp.transform._choice.graph import Graph
from jaxcomp.transform._program.primitives import POINTWISE
from jaxcomp.transform._program.program import read, variables
from jaxcomp.transform._program.types import Atom, Variable, is_variable

_NARROW = (jnp.bfloat16, jnp.float16)
_USUAL = 4.0  # largest magnitude of elements of which a function has nearly its whole range
_BEYOND = 0.125  # part by which the range of all elements may be wider


def bounds(graph: Graph, value: Variable) -> tuple[float, float] | None:
    """Returns the bounds of a value that is an elementwise function of one 16-bit array.

    The derivative of GELU is one. All of the array's 65,536 possible elements are tried, on the
    device at hand; the bounds are wider by a rounding error, as another device may round otherwise.
    Results that are not finite do not count.

    Args:
        graph: The forward program.
        value: A variable of it.

    Returns:
        The bounds; None if the value is no such function, or one that leaves the range that it has
        of `_USUAL` elements, as a square does.
    """
    search = _Search(graph)
    source = search.source(value)
    if source is None or source is value or source.aval.dtype not in _NARROW:
        return None
    with jax.ensure_compile_time_eval():
        numbers = lax.bitcast_convert_type(jnp.arange(2**16, dtype=jnp.uint16), source.aval.dtype)
        numbers = jnp.where(jnp.isfinite(numbers), numbers, 0)
        results = np.asarray(search.evaluate(value, source, numbers), np.float64)
        usual = results[np.abs(np.asarray(numbers, np.float64)) <= _USUAL]
    if not np.all(np.isfinite(usual)):
        return None
    results = results[np.isfinite(results)]
    span = np.ptp(results)
    if span > (1 + _BEYOND) * np.ptp(usual):
        return None
    margin = span * float(jnp.finfo(value.aval.dtype).eps)
    return float(results.min() - margin), float(results.max() + margin)


class _Search:
    """Looks for the one array that a value is a function of."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._sources: dict[Any, Any] = {}

    def source(self, value: Atom) -> Variable | None:
        """Returns the array, which is the value itself if there is no other; None of a constant."""
        if not is_variable(value):
            return None
        stack = [value]
        while stack:
            missing = [v for v in self._operands(stack[-1]) if v not in self._sources]
            if missing:
                stack += missing
            else:
                value_done = stack.pop()
                self._sources[value_done] = self._found(value_done)
        return self._sources[value]

    def _operands(self, value: Variable) -> list[Any]:
        """Returns the operands that decide a value's source.

        It is None of a step that is not elementwise.
        """
        equation = self._graph.program.made_by.get(value)
        if equation is None or equation.primitive.name not in (*POINTWISE, "broadcast_in_dim"):
            return []
        return variables(equation.invars)

    def _found(self, value: Variable) -> Any:
        """Returns the source of a value, whose operands have theirs."""
        equation = self._graph.program.made_by.get(value)
        if equation is None:
            return value
        name = equation.primitive.name
        operands = self._operands(value)
        if name == "broadcast_in_dim" and all(self._sources[v] is None for v in operands):
            return None
        shapes = {v.aval.shape for v in operands if self._sources[v] is not None}
        if name not in POINTWISE or shapes - {value.aval.shape}:
            return value
        sources = {self._sources[v] for v in operands} - {None}
        return value if len(sources) > 1 else next(iter(sources), None)

    def evaluate(self, value: Variable, source: Any, numbers: Any) -> Any:
        """Returns a value as a function of the array, at each of some numbers."""
        env = {source: numbers}
        stack = [value]
        while stack:
            equation = self._graph.program.made_by[stack[-1]]
            missing = [v for v in variables(equation.invars) if v not in env]
            if missing:
                stack += missing
                continue
            stack.pop()
            operands = [read(env, atom) for atom in equation.invars]
            if equation.primitive.name == "broadcast_in_dim":
                env[equation.outvars[0]] = jnp.ravel(operands[0])[0]
            else:
                wide = [jnp.broadcast_to(a, numbers.shape) for a in operands]
                # Not `apply`: these arrays have another shape than the program's.
                env[equation.outvars[0]] = equation.primitive.bind(*wide, **equation.params)
        return env[value]
