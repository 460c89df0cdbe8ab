"""Second ways to compute a value of the forward program, for when its operands are lossy."""

import os
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from jaxcomp.transform._algebra import is_cheap_rule
from jaxcomp.transform._origins import located
from jaxcomp.transform._programs import Program, avals, closed, evaluate, flat, scope_of

Pair = tuple[Any, Any]  # a value, and the same made in another way
Rewrite = Callable[[JaxprEqn, list[Any], list[Any]], Iterator[Pair]]

_COMPARED = {"max": lax.gt_p, "min": lax.lt_p}


def with_rewrites(forward: Program) -> tuple[Program, dict[Any, Any]]:
    """Adds to a program the values of some equations, made in a way that is affine or open.

    The greater of two values is selected by a mask, which is exact where the values are not. What
    a `jax.custom_jvp` function returns is computed by the function's steps, if these are cheap or
    the function is JAX's own. Any other is one step: its steps do not tell its second derivative.

    Returns:
        The program with more results, and which of its variables equals which other.
    """
    count = len(forward.jaxpr.outvars)
    opened = _with_pairs(forward, _opened, {"custom_jvp_call"})
    traced = _with_pairs(opened, _selected, _COMPARED)
    kept, added = traced.jaxpr.outvars[:count], traced.jaxpr.outvars[count:]
    same = dict(zip(added[::2], added[1::2], strict=True))
    return closed(traced.jaxpr.replace(outvars=kept), traced.consts), same


def _with_pairs(forward: Program, rewrite: Rewrite, primitives: Collection[str]) -> Program:
    """Adds to a program's results each pair that `rewrite` finds in equations of `primitives`."""
    if not any(equation.primitive.name in primitives for equation in forward.jaxpr.eqns):
        return forward

    def run(*arguments: Any) -> list[Any]:
        pairs: list[Any] = []

        def visit(equation: JaxprEqn, values: list[Any], results: list[Any]) -> None:
            for pair in rewrite(equation, values, results):
                pairs.extend(pair)

        return [*evaluate(forward.jaxpr, forward.consts, arguments, visit), *pairs]

    return flat(jax.make_jaxpr(run)(*avals(forward.jaxpr.invars)))


def _selected(equation: JaxprEqn, values: list[Any], results: list[Any]) -> Iterator[Pair]:
    compare = _COMPARED.get(equation.primitive.name)
    (result, *_) = results or [None]
    if compare is not None and jnp.issubdtype(result.dtype, jnp.floating):
        with scope_of(equation):
            mask = compare.bind(*values)
            one, other = (_broadcast(v, result.shape) for v in values)
            yield result, lax.select_n(mask, other, one)


def _broadcast(value: Any, shape: tuple[int, ...]) -> Any:
    """A scalar or an array of as many axes, in a shape."""
    return lax.broadcast_in_dim(value, shape, range(len(shape) - jnp.ndim(value), len(shape)))


def _opened(equation: JaxprEqn, values: list[Any], results: list[Any]) -> Iterator[Pair]:
    if is_cheap_rule(equation) or is_of_jax(equation):
        called = equation.params["call_jaxpr"]
        opened = located(called.jaxpr, equation)
        with scope_of(equation):
            made = evaluate(opened, called.consts, values)
        yield from zip(results, made, strict=True)


def is_of_jax(equation: JaxprEqn) -> bool:
    """Whether an equation calls a `jax.custom_jvp` function that JAX defines."""
    if equation.primitive.name != "custom_jvp_call":
        return False
    file = equation.params["call_jaxpr"].jaxpr.debug_info.func_filename or ""
    return bool(file.startswith(os.path.dirname(jax.__file__) + os.sep))
