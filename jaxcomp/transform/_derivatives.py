"""Chains of elementwise derivatives become one coefficient each."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from jaxcomp.transform._algebra import ELEMENTWISE, tangents_of
from jaxcomp.transform._programs import (
    Linearized,
    Values,
    apply,
    avals,
    evaluate,
    filled,
    flat,
    is_variable,
    read,
)

Costly = Callable[[Any], bool]


@dataclasses.dataclass
class _Chain:
    """Equations that are elementwise in one tangent, and their results that others read."""

    equations: list[JaxprEqn] = dataclasses.field(default_factory=list)
    ends: list[Any] = dataclasses.field(default_factory=list)


def merge(linearized: Linearized, costly: Costly) -> Linearized:
    """Replaces elementwise chains of a linear program by products with one derivative.

    A GELU is such a chain: four coefficients of the size of its input, of which one derivative is
    made in the forward program. So is a quotient, whose denominator would have to be exact.

    Args:
        linearized: A function's forward program and its linear one.
        costly: Whether a value of the forward program would have to be stored at full size.

    Returns:
        Programs of the same results, to rounding.
    """
    forward, linear = linearized.forward, linearized.linear.jaxpr
    count = len(linear.invars) - len(linearized.active)
    tangents = tangents_of(linear.eqns, linear.invars[count:])
    behind = dict(zip(linear.invars, linearized.coefficients, strict=False))
    chains = _chains(linear, tangents)
    chosen = {
        start: chain
        for start, chain in chains.items()
        if _is_worth_it(chain, tangents, lambda v: v in behind and costly(behind[v]))
    }
    start_of = {end: start for start, chain in chosen.items() for end in chain.ends}
    inside = {out for chain in chosen.values() for e in chain.equations for out in e.outvars}
    kept = [
        e for e in linear.eqns if tangents.intersection(e.outvars) and e.outvars[0] not in inside
    ]
    needed = dict.fromkeys(
        atom
        for atoms in (*(e.invars for e in kept), linear.outvars)
        for atom in atoms
        if is_variable(atom) and atom not in tangents
    )

    def forward_with_derivatives(*arguments: Any) -> list[Any]:
        made = evaluate(forward.jaxpr, forward.consts, arguments)
        env: Values = dict(zip(linear.invars, made[linearized.results :], strict=False))
        for equation in linear.eqns:
            if not tangents.intersection(equation.outvars):
                values = [read(env, atom) for atom in equation.invars]
                env |= dict(zip(equation.outvars, apply(linear, equation, values), strict=True))
        for start, chain in chosen.items():
            env[start] = filled(start.aval, 1.0)
            for equation in chain.equations:
                values = [read(env, atom) for atom in equation.invars]
                env |= dict(zip(equation.outvars, apply(linear, equation, values), strict=True))
        coefficients = [*(env[v] for v in needed), *(env[end] for end in start_of)]
        return [*made[: linearized.results], *coefficients]

    def shortened(*given: Any) -> list[Any]:
        env: Values = dict(zip(needed, given, strict=False))
        derivatives = dict(zip(start_of, given[len(needed) :], strict=False))
        env |= dict(zip(linear.invars[count:], given[len(needed) + len(start_of) :], strict=True))
        for equation in linear.eqns:
            (*_, out) = equation.outvars
            if out in start_of:
                tangent = env[start_of[out]].astype(derivatives[out].dtype)
                env[out] = lax.mul(tangent, derivatives[out])
            elif out in tangents and out not in inside:
                values = [read(env, atom) for atom in equation.invars]
                env |= dict(zip(equation.outvars, apply(linear, equation, values), strict=True))
        return [read(env, atom) for atom in linear.outvars]

    inputs = [*needed, *start_of, *linear.invars[count:]]
    return dataclasses.replace(
        linearized,
        forward=flat(jax.make_jaxpr(forward_with_derivatives)(*avals(forward.jaxpr.invars))),
        linear=flat(jax.make_jaxpr(shortened)(*avals(inputs))),
    )


def _chains(linear: Any, tangents: set[Any]) -> dict[Any, _Chain]:
    start_of: dict[Any, Any] = {}
    chains: dict[Any, _Chain] = {}
    ends: dict[Any, None] = {}

    def start(tangent: Any) -> Any:
        return start_of.get(tangent, tangent)

    for equation in linear.eqns:
        operands = [a for a in equation.invars if is_variable(a) and a in tangents]
        starts = {start(a) for a in operands}
        if len(starts) == 1 and _is_elementwise(equation, operands):
            (only,) = starts
            start_of[equation.outvars[0]] = only
            chains.setdefault(only, _Chain()).equations.append(equation)
        else:
            ends |= dict.fromkeys(operands)
    ends |= dict.fromkeys(a for a in linear.outvars if is_variable(a))
    for end in ends:
        if end in start_of:
            chains[start_of[end]].ends.append(end)
    return chains


def _is_elementwise(equation: JaxprEqn, operands: list[Any]) -> bool:
    (out, *others) = equation.outvars
    kinds: list[Any] = avals([out, *operands])
    real = all(jnp.issubdtype(kind.dtype, jnp.floating) for kind in kinds)
    same_shape = len({kind.shape for kind in kinds}) == 1
    return equation.primitive.name in ELEMENTWISE and not others and real and same_shape


def _is_worth_it(chain: _Chain, tangents: set[Any], costly: Costly) -> bool:
    factors = {
        atom
        for equation in chain.equations
        for atom in equation.invars
        if is_variable(atom) and atom not in tangents and costly(atom)
    }
    divisors = [e.invars[1] for e in chain.equations if e.primitive.name == "div"]
    divides = any(is_variable(divisor) and divisor in factors for divisor in divisors)
    return len(factors) > len(chain.ends) or divides
