"""The values of a program that are the same for every input, such as a causal mask."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jaxcomp.transform._program.primitives import POINTWISE, is_cheap
from jaxcomp.transform._program.program import Program, apply, avals, variables
from jaxcomp.transform._program.types import Atom, Equation, Variable, is_variable

_LARGEST = 2**26  # elements of a constant that is evaluated


def constants(program: Program) -> set[Variable]:
    """Returns the variables that cheap equations make of literals."""
    found: set[Any] = set()
    for equation in program.equations:
        cheap = is_cheap(equation) or equation.primitive.name == "pvary"
        if cheap and found.issuperset(variables(equation.invars)):
            found.update(equation.outvars)
    return found


def evaluated(program: Program) -> dict[Variable, np.ndarray[Any, Any]]:
    """Returns the constants of a program, with one element along axes of repetition.

    A mask of all examples and heads has a single one of each. Those that need other steps than
    elementwise ones and moves of axes are missing, and those of more than 2**26 elements.
    """
    found: dict[Any, np.ndarray[Any, Any]] = {}
    of_literals = constants(program)
    for equation in program.equations:
        (out, *more) = equation.outvars
        given = [value_of(v, found) for v in equation.invars]
        if out in of_literals and not more and all(value is not None for value in given):
            made = _evaluate(equation, given)
            if made is not None:
                found[out] = made
    return found


def part_of(program: Program, variable: Variable, ranges: Sequence[slice]) -> Array:
    """Returns a part of a constant, made without the rest of it.

    Args:
        program: The program.
        variable: The constant's variable.
        ranges: What is made, along each axis.
    """

    def make(atom: Atom, ranges: Sequence[slice]) -> Any:
        if not is_variable(atom):
            return atom.val
        equation = program.made_by[atom]
        name, params = equation.primitive.name, dict(equation.params)
        shape = tuple(r.stop - r.start for r in ranges)
        operands = [list(slice(0, n) for n in v.shape) for v in avals(equation.invars)]
        if name == "iota":
            numbers = lax.broadcasted_iota(jnp.int32, shape, params["dimension"])
            return (numbers + ranges[params["dimension"]].start).astype(params["dtype"])
        if name == "broadcast_in_dim":
            for i, axis in enumerate(params["broadcast_dimensions"]):
                if avals(equation.invars)[0].shape[i] > 1:
                    operands[0][i] = ranges[axis]
            params["shape"] = shape
        elif name == "transpose":
            for axis, i in enumerate(params["permutation"]):
                operands[0][i] = ranges[axis]
        elif name in POINTWISE | {"pvary"}:
            operands = [list(ranges) if whole else whole for whole in operands]
        else:
            values = [make(v, whole) for v, whole in zip(equation.invars, operands, strict=True)]
            made = apply(equation, values)[equation.outvars.index(atom)]
            return lax.slice(made, [r.start for r in ranges], [r.stop for r in ranges])
        values = [make(v, part) for v, part in zip(equation.invars, operands, strict=True)]
        if name == "broadcast_in_dim":
            values = [_in_memory(x, shape) for x in values]
        (made,) = apply(equation.replace(params=params), values)
        return made

    made: Array = make(variable, ranges)
    return made


def _in_memory(x: Array, shape: tuple[int, ...]) -> Any:
    """Places a barrier after a matrix that is then broadcast, such as a mask for all heads.

    XLA then writes the matrix to memory. It takes long to choose tiles for a softmax of a GPU that
    also computes its mask.
    """
    is_matrix = np.size(x) > max(np.shape(x), default=1)
    return lax.optimization_barrier(x) if is_matrix and math.prod(shape) > x.size else x


def value_of(atom: Atom, constants: Mapping[Any, np.ndarray[Any, Any]]) -> Any:
    """Returns the value of a literal or of a known constant; None of any other variable."""
    return constants.get(atom) if is_variable(atom) else np.asarray(atom.val)


def _evaluate(equation: Equation, given: list[np.ndarray[Any, Any]]) -> Any:
    name, params = equation.primitive.name, equation.params
    kind: Any = equation.outvars[0].aval
    if name == "iota":
        axis = params["dimension"]
        shape = [kind.shape[i] if i == axis else 1 for i in range(kind.ndim)]
        return np.arange(kind.shape[axis], dtype=kind.dtype).reshape(shape)
    if name == "broadcast_in_dim":
        shape = [1] * kind.ndim
        for axis, size in zip(params["broadcast_dimensions"], given[0].shape, strict=True):
            shape[axis] = size
        return given[0].reshape(shape)
    if name == "pvary":
        return given[0]
    if name == "transpose":
        return given[0].transpose(params["permutation"])
    if name == "squeeze":
        return given[0].squeeze(tuple(params["dimensions"]))
    if name not in POINTWISE:
        return None
    ndim = kind.ndim
    shapes = [value.shape for value in given if value.ndim == ndim]
    whole = np.broadcast_shapes(*shapes)
    if math.prod(whole) > _LARGEST:
        return None
    arrays = [np.broadcast_to(v, whole) if v.ndim == ndim else v for v in given]
    with jax.ensure_compile_time_eval():
        return np.asarray(equation.primitive.bind(*arrays, **params))
