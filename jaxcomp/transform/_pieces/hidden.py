"""What is zero for the keys of an attention that a chunk of its queries does not see."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxcomp.transform._pieces.axes import Axes, WholeError
from jaxcomp.transform._program.constants import value_of
from jaxcomp.transform._program.primitives import POINTWISE
from jaxcomp.transform._program.types import Equation, is_variable

_SAME = {
    "convert_element_type", "copy", "name", "pvary", "reduce_precision", "reshape",
    "sharding_constraint",
    "squeeze", "stop_gradient", "transpose",
}  # fmt: skip
_EXPONENTIALS = {"exp", "exp2", "logistic"}
_SUMS = {"add", "add_any", "sub"}
_PIECES = {"concatenate", "pad", "slice", "split"}


class Chunk(NamedTuple):
    """A range of queries, and the range of the keys that one of them sees."""

    queries: slice
    keys: slice


class State(NamedTuple):
    """What is known of an array of a chunk.

    Attributes:
        zero: It is 0 for the keys out of the chunk.
        hidden: Its exponential is 0 for them, also less the maximum of a query's scores.
        flat: It is the same for all keys.
        summed: It is a sum over the queries of the chunk, to which the other chunks add.
        own: It depends on nothing but the masked scores.
    """

    zero: bool = False
    hidden: bool = False
    flat: bool = False
    summed: bool = False
    own: bool = False


class Scores:
    """Masked scores.

    Attributes:
        variable: Their variable.

    Args:
        axes: Those of a program.
        variable: The variable.
        queries: Their axis of the queries.
        keys: Their axis of the keys.

    Raises:
        WholeError: If they are the same, or some equation reads all along one.
    """

    def __init__(self, axes: Axes, variable: Any, queries: int, keys: int) -> None:
        self.variable = variable
        self._axes = axes
        self._along: dict[Any, tuple[int | None, int | None]] = {}
        self._kinds = axes.find((variable, queries)), axes.find((variable, keys))
        if self._kinds[0] == self._kinds[1] or not all(map(axes.is_cut, self._kinds)):
            raise WholeError("queries and keys are no axes of their own")
        self._size = variable.aval.shape[keys]

    def along(self, variable: Any) -> tuple[int | None, int | None]:
        """Returns the axis of the queries and that of the keys; None if there is none."""
        if variable not in self._along:
            queries, keys = (self._axes.of(variable, kind) for kind in self._kinds)
            self._along[variable] = queries, keys
        return self._along[variable]

    def all_keys(self, chunk: Chunk) -> bool:
        """Returns whether a chunk has all keys."""
        return chunk.keys == slice(0, self._size)


def state_of(
    equation: Equation,
    states: Mapping[Any, State],
    constants: Mapping[Any, np.ndarray[Any, Any]],
    scores: Scores,
    chunk: Chunk,
) -> State:
    """Returns what is known of the results of an equation.

    Args:
        equation: The equation.
        states: Of its operands.
        constants: Values of constants.
        scores: The axes of queries and keys.
        chunk: The chunk.

    Raises:
        WholeError: If it needs what is out of the chunk.
    """
    (out, *_) = equation.outvars
    given = [states.get(v, State()) if is_variable(v) else State() for v in equation.invars]
    for i, atom in enumerate(equation.invars):
        value = value_of(atom, constants)
        if value is not None:
            along = scores.along(atom) if is_variable(atom) else (None, None)
            given[i] = _of_constant(value, along, chunk)
    name = equation.primitive.name
    rows, columns = scores.along(out)
    summed = any(state.summed for state in given)
    if summed and not _is_linear(name, given):
        raise WholeError(f"{name} of a sum over queries")
    queries, keys = _lost(equation, scores)
    if queries:
        if name not in ("dot_general", "reduce_sum"):
            raise WholeError(f"{name} over queries")
        summed = True
    if summed and rows is not None:
        raise WholeError("a sum over queries that has queries")
    if keys and not scores.all_keys(chunk):
        known = {"dot_general": "zero", "reduce_sum": "zero", "reduce_max": "hidden"}.get(name)
        if known is None or not any(getattr(state, known) for state in given):
            raise WholeError(f"{name} over keys")
    if out is scores.variable:
        return State(hidden=True, own=True)
    own = all(state.own for state in given)
    if columns is None:
        return State(flat=True, summed=summed, own=own)
    found = _along_keys(equation, given, constants, scores, chunk)
    return found._replace(summed=summed, own=own)


def _along_keys(
    equation: Equation,
    given: Sequence[State],
    constants: Mapping[Any, np.ndarray[Any, Any]],
    scores: Scores,
    chunk: Chunk,
) -> State:
    """Returns what is known of a result that has keys."""
    name, params = equation.primitive.name, equation.params
    operands: list[Any] = list(equation.invars)
    has_keys = [is_variable(v) and scores.along(v)[1] is not None for v in operands]
    if name == "broadcast_in_dim":
        return given[0] if has_keys[0] else State(flat=True)
    if name in _SAME:
        return given[0]
    if name == "reduce_sum":
        return State(zero=given[0].zero)
    if name == "dot_general":
        return State(zero=any(s.zero for s, has in zip(given, has_keys, strict=True) if has))
    if name in _PIECES:
        return State(zero=all(state.zero for state in given))
    if name not in POINTWISE:
        return State()
    if name == "select_n":
        which, cases = constants.get(operands[0]), given[1:]
        if which is not None:
            outside = np.unique(_outside(which, scores.along(operands[0]), chunk))
            cases = [cases[int(case)] for case in outside]
        zero = all(state.zero for state in cases)
    elif name == "mul":
        zero = any(state.zero for state in given)
    elif name in _SUMS:
        zero = all(state.zero for state in given)
    elif name in _EXPONENTIALS:
        zero = given[0].hidden
    else:
        raised = name == "integer_pow" and params["y"] > 0
        zero = given[0].zero and (raised or name in ("div", "neg"))
    # Less what depends on other values, which may be as large, a hidden score may be the greatest.
    hidden = name == "sub" and given[0].hidden and given[1].flat and given[1].own
    return State(zero, hidden, flat=all(state.flat for state in given))


def _is_linear(name: str, given: Sequence[State]) -> bool:
    """Returns whether an equation is linear in operands that are sums, and has no others."""
    sums = [state.summed for state in given]
    if name in _SAME | {"neg", "reduce_sum", "broadcast_in_dim", "slice", "split"}:
        return True
    if name in _SUMS | {"concatenate"}:
        return all(sums)
    if name == "pad":
        return given[1].zero
    return (name in ("mul", "dot_general") and sum(sums) == 1) or (name == "div" and not sums[1])


def _lost(equation: Equation, scores: Scores) -> tuple[bool, bool]:
    """Returns whether a reduction or a product is over queries, and whether over keys."""
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (axes, _), _ = params["dimension_numbers"]
    else:
        axes = params.get("axes", ())
    if not axes or not is_variable(equation.invars[0]):
        return False, False
    queries, keys = scores.along(equation.invars[0])
    return queries in axes, keys in axes


def _of_constant(
    value: np.ndarray[Any, Any], along: tuple[int | None, int | None], chunk: Chunk
) -> State:
    _, keys = along
    zero = bool(np.all(_outside(value, along, chunk) == 0))
    return State(zero, own=True, flat=keys is None or value.shape[keys] == 1)


def _outside(
    value: np.ndarray[Any, Any], along: tuple[int | None, int | None], chunk: Chunk
) -> np.ndarray[Any, Any]:
    """Returns the elements of a constant for the chunk's queries and the keys out of it."""
    queries, keys = along
    if queries is not None and value.shape[queries] > 1:
        value = value.take(range(*chunk.queries.indices(value.shape[queries])), queries)
    if keys is not None and value.shape[keys] > 1:
        value = np.delete(value, chunk.keys, keys)
    return value
