"""The values of a program that are the same for every input, such as a causal mask."""

import math
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from jaxcomp.transform._algebra import POINTWISE, is_cheap
from jaxcomp.transform._programs import is_variable, variables

_LARGEST = 2**26  # elements of a constant that is evaluated


def constants(jaxpr: Jaxpr) -> set[Any]:
    """The variables that cheap equations make of literals."""
    found: set[Any] = set()
    for equation in jaxpr.eqns:
        if is_cheap(equation) and found.issuperset(variables(equation.invars)):
            found.update(equation.outvars)
    return found


def evaluated(jaxpr: Jaxpr) -> dict[Any, np.ndarray[Any, Any]]:
    """The constants of a program, with one element along each axis that they are repeated along.

    A mask of all examples and heads has a single one of each. Those that need other steps than
    elementwise ones and moves of axes are missing, and those of more than 2**26 elements.
    """
    found: dict[Any, np.ndarray[Any, Any]] = {}
    of_literals = constants(jaxpr)
    for equation in jaxpr.eqns:
        (out, *more) = equation.outvars
        given = [found.get(v) if is_variable(v) else np.asarray(v.val) for v in equation.invars]
        if out in of_literals and not more and all(value is not None for value in given):
            made = _evaluate(equation, given)
            if made is not None:
                found[out] = made
    return found


def _evaluate(equation: JaxprEqn, given: list[Any]) -> Any:
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
    if name == "transpose":
        return given[0].transpose(params["permutation"])
    if name == "squeeze":
        return given[0].squeeze(tuple(params["dimensions"]))
    if name not in POINTWISE:
        return None
    ndim = kind.ndim
    shapes = [value.shape for value in given if value.ndim == ndim]
    shape = np.broadcast_shapes(*shapes)
    if math.prod(shape) > _LARGEST:
        return None
    arrays = [np.broadcast_to(v, shape) if v.ndim == ndim else v for v in given]
    with jax.ensure_compile_time_eval():
        return np.asarray(equation.primitive.bind(*arrays, **params))
