"""Second ways to compute a value of the forward program, for when its operands are lossy."""

import os
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from jaxcomp.transform._algebra import is_cheap_rule
from jaxcomp.transform._origins import located
from jaxcomp.transform._programs import Program, avals, closed, evaluate, flat, scope_of

_COMPARED = {"max": lax.gt_p, "min": lax.lt_p}


def with_rewrites(forward: Program) -> tuple[Program, dict[Any, Any]]:
    """Adds to a program the values of some equations, made in a way that is affine or open.

    The greater of two values is selected by a mask, which is exact where the values are not. What
    a `jax.custom_jvp` function returns is computed by the function's steps, if these are cheap or
    the function is JAX's own. Any other is one step: its steps do not tell its second derivative.

    Returns:
        The program with more results, and which of its variables equals which other.
    """
    forward, first = _calls_opened(forward)
    count = len(forward.jaxpr.outvars)
    pairs: list[tuple[Any, Any]] = []

    def select(equation: JaxprEqn, values: list[Any], results: list[Any]) -> None:
        compare = _COMPARED.get(equation.primitive.name)
        (result, *_) = results or [None]
        if compare is not None and jnp.issubdtype(result.dtype, jnp.floating):
            with scope_of(equation):
                mask = compare.bind(*values)
                one, other = (jnp.broadcast_to(v, result.shape) for v in values)
                pairs.append((result, lax.select_n(mask, other, one)))

    def run(*arguments: Any) -> list[Any]:
        pairs.clear()
        made = evaluate(forward.jaxpr, forward.consts, arguments, select)
        return [*made, *(value for pair in pairs for value in pair)]

    traced = flat(jax.make_jaxpr(run)(*avals(forward.jaxpr.invars)))
    kept = traced.jaxpr.outvars[: count - 2 * first]
    added = traced.jaxpr.outvars[count - 2 * first :]
    same = dict(zip(added[::2], added[1::2], strict=True))
    return closed(traced.jaxpr.replace(outvars=kept), traced.consts), same


def _calls_opened(forward: Program) -> tuple[Program, int]:
    pairs: list[tuple[Any, Any]] = []

    def open_call(equation: JaxprEqn, values: list[Any], results: list[Any]) -> None:
        if is_cheap_rule(equation) or _is_of_jax(equation):
            called = equation.params["call_jaxpr"]
            opened = located(called.jaxpr, equation)
            with scope_of(equation):
                made = evaluate(opened, called.consts, values)
            pairs.extend(zip(results, made, strict=True))

    def run(*arguments: Any) -> list[Any]:
        pairs.clear()
        made = evaluate(forward.jaxpr, forward.consts, arguments, open_call)
        return [*made, *(value for pair in pairs for value in pair)]

    return flat(jax.make_jaxpr(run)(*avals(forward.jaxpr.invars))), len(pairs)


def _is_of_jax(equation: JaxprEqn) -> bool:
    """Whether an equation calls a `jax.custom_jvp` function that JAX defines."""
    if equation.primitive.name != "custom_jvp_call":
        return False
    file = equation.params["call_jaxpr"].jaxpr.debug_info.func_filename or ""
    return bool(file.startswith(os.path.dirname(jax.__file__) + os.sep))
