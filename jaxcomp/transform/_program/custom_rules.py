"""Which derivative rule a function with a rule of its own has, and who wrote it."""

import inspect
import os
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import jax
from jax.extend.linear_util import WrappedFun

from jaxcomp._core import remat3
from jaxcomp.transform._program.types import Equation

_JAX = os.path.dirname(jax.__file__) + os.sep
PACKAGE = os.path.dirname(os.path.dirname(remat3.__file__)) + os.sep
"""Folder of this package."""
_HOLDERS: Any = (jax.custom_jvp, type(jax.jit(len)))  # of one function
_TRACED_BY = {  # the parameters that trace the rule of a call
    "custom_jvp_call": ("jvp_jaxpr_fun",),
    "custom_vjp_call": ("fwd_jaxpr_thunk", "bwd"),
    "custom_lin": ("bwd",),  # its derivative
}


def rule_of(equation: Equation) -> tuple[Any, ...] | None:
    """Returns the rule of a call of a `jax.custom_jvp` or `jax.custom_vjp` function.

    JAX keeps it in a closure of what traces it, and so does each transformation, such as
    `jax.vmap`. Rules are the same if the objects are.

    Returns:
        The functions that the rule consists of and their static arguments; None if it is unknown.
    """
    pending = [equation.params[name] for name in _TRACED_BY.get(equation.primitive.name, ())]
    parts: list[Any] = []
    while pending:
        value = pending.pop()
        inside = list(_closed_over(value.f if isinstance(value, WrappedFun) else value))
        traced = [v for v in inside if isinstance(v, WrappedFun)]
        if isinstance(value, WrappedFun):
            static_arguments = [
                argument for _, arguments in value.transforms for argument in arguments
            ]
            parts += [argument.val for argument in static_arguments if hasattr(argument, "val")]
            if value.transforms and not traced:
                parts.append(value.f)
                continue
        pending += traced or [v for v in inside if isinstance(v, FunctionType)]
    return tuple(parts) or None


def is_of_jax(equation: Equation) -> bool:
    """Returns whether an equation calls a `jax.custom_jvp` function and rule of JAX."""
    if equation.primitive.name != "custom_jvp_call":
        return False
    file: str = equation.params["call_jaxpr"].jaxpr.debug_info.func_filename or ""
    return file.startswith(_JAX) and _are_of_jax(rule_of(equation))


def has_rule_in(equation: Equation, start: str) -> bool:
    """Returns whether the rule of an equation is of files whose paths start so."""
    functions = [f for f in rule_of(equation) or () if isinstance(f, FunctionType)]
    files = [inspect.unwrap(f).__code__.co_filename for f in functions]
    return bool(files) and all(file.startswith(start) for file in files)


def is_rule_of_user(equation: Equation) -> bool:
    """Returns whether an equation of a linear program is the rule of a user's `jax.custom_vjp`."""
    return equation.primitive.name == "custom_lin" and not has_rule_in(equation, PACKAGE)


def _are_of_jax(rule: tuple[Any, ...] | None) -> bool:
    """Returns whether the functions of a rule, and all that they close over, are of JAX.

    A rule of `jax.custom_jvp.defjvps` is a function of JAX that closes over the user's.
    """
    if rule is None:
        return False
    pending, seen = [*rule], set[int]()
    while pending:
        value = pending.pop()
        if isinstance(value, tuple | list):
            pending += value
        elif isinstance(value, _HOLDERS):
            pending.append(value.__wrapped__)
        elif isinstance(value, FunctionType):
            if not value.__code__.co_filename.startswith(_JAX):
                return False
            if id(value) not in seen:
                seen.add(id(value))
                pending += _closed_over(value)
        elif value is not None and not isinstance(value, int | str):
            return False
    return True


def _closed_over(function: Any) -> Iterator[Any]:
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a variable that is not set, or no longer
            continue
