"""Chains of elementwise derivatives become one coefficient each."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxcomp._core.shard_map import filled
from jaxcomp.transform._program.builder import Builder, key_of_step, renamed
from jaxcomp.transform._program.linearized import Linearized
from jaxcomp.transform._program.primitives import ELEMENTWISE, tangents_of
from jaxcomp.transform._program.program import Program, read, variables
from jaxcomp.transform._program.types import Atom, Equation, Renaming, Variable, is_variable

Costly = Callable[[Variable], bool]


@dataclasses.dataclass
class _Chain:
    """Equations that are elementwise in one tangent, and their results that others read."""

    equations: list[Equation] = dataclasses.field(default_factory=list)
    ends: list[Any] = dataclasses.field(default_factory=list)


def merge(linearized: Linearized, costly: Costly, *, casts: bool) -> Linearized:
    """Replaces elementwise chains of a linear program by products with one derivative.

    A GELU is such a chain: four coefficients of the size of its input, of which one derivative is
    made in the forward program. So is a quotient, whose denominator would have to be exact.

    Args:
        linearized: A function's forward program and its linear one.
        costly: Whether a value of the forward program would have to be stored at full size.
        casts: Whether chains of several dtypes are replaced, too.

    Returns:
        Programs of the same results, to rounding.
    """
    linear = linearized.linear
    count = len(linear.arguments) - len(linearized.active)
    tangents = tangents_of(linear.equations, linear.arguments[count:])
    behind = dict(zip(linear.arguments, linearized.coefficients, strict=False))
    chains = _chains(linear, tangents)
    chosen = {
        start: chain
        for start, chain in chains.items()
        if (casts or not _has_casts(chain))
        and _is_worth_it(chain, tangents, lambda v: v in behind and costly(behind[v]))
    }
    start_of = {end: start for start, chain in chosen.items() for end in chain.ends}
    inside = {out for chain in chosen.values() for e in chain.equations for out in e.outvars}
    kept = [
        e
        for e in linear.equations
        if tangents.intersection(e.outvars) and e.outvars[0] not in inside
    ]
    needed = dict.fromkeys(
        atom
        for atoms in (*(e.invars for e in kept), linear.results)
        for atom in atoms
        if is_variable(atom) and atom not in tangents
    )

    return dataclasses.replace(
        linearized,
        forward=_with_derivatives(linearized, tangents, chosen, [*needed], start_of),
        linear=_shortened(linear, count, tangents, [*needed], start_of, inside),
    )


def _with_derivatives(
    linearized: Linearized,
    tangents: set[Variable],
    chains: dict[Variable, _Chain],
    needed: list[Variable],
    start_of: dict[Variable, Variable],
) -> Program:
    """Returns the forward program, with the needed coefficients and the derivatives of chains."""
    builder, made, env = with_coefficients(linearized, tangents)
    for start, chain in chains.items():
        env.update(zip(chain.ends, _derivatives_of(builder, start, chain, env), strict=True))
    coefficients = [env[v] for v in (*needed, *start_of)]
    forward = linearized.forward
    return builder.program(forward, forward.arguments, [*made, *coefficients])


def with_coefficients(
    linearized: Linearized, tangents: set[Variable]
) -> tuple[Builder, list[Atom], Renaming]:
    """Returns a builder of the forward program, its results, and all that is no tangent in it."""
    forward, linear = linearized.forward, linearized.linear
    builder = Builder()
    made = builder.inline(forward, forward.arguments)
    env = builder.constants_of(linear)
    env |= dict(zip(linear.arguments, made[linearized.results :], strict=False))
    for equation in linear.equations:
        if not tangents.intersection(equation.outvars):
            builder.copy(equation, env)
    return builder, made[: linearized.results], env


def _shortened(
    linear: Program,
    count: int,
    tangents: set[Variable],
    needed: list[Variable],
    start_of: dict[Variable, Variable],
    inside: set[Variable],
) -> Program:
    """Returns the linear program, in which chains are products with their derivatives."""
    builder = Builder()
    derivatives = {end: Variable(end.aval) for end in start_of}
    env = builder.constants_of(linear) | {v: v for v in (*needed, *linear.arguments[count:])}
    for equation in linear.equations:
        (*_, out) = equation.outvars
        if out in start_of:
            tangent = env[start_of[out]]
            operands = tangent, derivatives[out]
            (env[out],) = builder.trace(_scaled, *operands, at=equation, key=_scaled)
        elif out in tangents and out not in inside:
            builder.copy(equation, env)
    arguments = [*needed, *derivatives.values(), *linear.arguments[count:]]
    return builder.program(linear, arguments, renamed(env, linear.results))


def _derivatives_of(
    builder: Builder, start: Variable, chain: _Chain, coefficients: Renaming
) -> list[Any]:
    """Returns the derivatives of a chain's ends by its start, each rounded once.

    In a narrow dtype the product of factors that are the same for all elements, such as a scale
    and that of dropout, would be rounded alike for all. So the steps of a chain that begins with
    such a factor, or has casts, are taken in float32 or wider.
    """
    wide: Any = None
    if _has_casts(chain) or _begins_with_scalar(chain, start):
        wide = jnp.result_type(jnp.float32, start.aval, *(end.aval for end in chain.ends))
    kind = start.aval.update(dtype=wide or start.aval.dtype)
    env: Renaming = {}
    (env[start],) = builder.trace(lambda: [filled(kind, 1.0)], key=kind)
    for equation in chain.equations:
        step, equal = functools.partial(_step, equation, wide), key_of_step(equation)
        operands = [env.get(v) or coefficients[v] for v in variables(equation.invars)]
        results = builder.trace(step, *operands, at=equation, key=equal and (equal, wide))
        env |= zip(equation.outvars, results, strict=True)
    return [_cast(builder, env[end], end.aval.dtype) for end in chain.ends]


def _step(equation: Equation, wide: DTypeLike | None, *values: Array) -> list[Any]:
    """Returns the derivative after a step of a chain, of that before it and of factors."""
    env = dict(zip(variables(equation.invars), values, strict=True))
    operands = [read(env, atom) for atom in equation.invars]
    if wide is not None:
        operands = [widened(operand, wide) for operand in operands]
    if equation.primitive.name == "convert_element_type":
        return operands
    with equation.ctx.manager:
        return [equation.primitive.bind(*operands, **equation.params)]


def widened(value: Array, dtype: DTypeLike) -> Any:
    """Returns a number in a dtype, if it is a float."""
    is_float = jnp.issubdtype(jnp.result_type(value), jnp.floating)
    return jnp.asarray(value, dtype) if is_float else value


def _cast(builder: Builder, value: Atom, dtype: Any) -> Atom:
    (cast,) = builder.trace(lambda x: [x.astype(dtype)], value, key=dtype)
    return cast


def _scaled(tangent: Any, derivative: Any) -> list[Any]:
    return [lax.mul(tangent.astype(derivative.dtype), derivative)]


def _chains(linear: Program, tangents: set[Variable]) -> dict[Variable, _Chain]:
    start_of: dict[Variable, Variable] = {}
    chains: dict[Variable, _Chain] = {}
    ends: dict[Any, None] = {}

    def start(tangent: Any) -> Any:
        return start_of.get(tangent, tangent)

    for equation in linear.equations:
        operands = [a for a in equation.invars if is_variable(a) and a in tangents]
        starts = {start(a) for a in operands}
        if len(starts) == 1 and _is_elementwise(equation, operands):
            (only,) = starts
            start_of[equation.outvars[0]] = only
            chains.setdefault(only, _Chain()).equations.append(equation)
        else:
            ends |= dict.fromkeys(operands)
    ends |= dict.fromkeys(a for a in linear.results if is_variable(a))
    for end in ends:
        if end in start_of:
            chains[start_of[end]].ends.append(end)
    return chains


def _is_elementwise(equation: Equation, operands: list[Variable]) -> bool:
    (out, *others) = equation.outvars
    kinds = [variable.aval for variable in (out, *operands)]
    real = all(jnp.issubdtype(kind.dtype, jnp.floating) for kind in kinds)
    same_shape = len({kind.shape for kind in kinds}) == 1
    return equation.primitive.name in ELEMENTWISE and not others and real and same_shape


def _begins_with_scalar(chain: _Chain, start: Variable) -> bool:
    """Returns whether a first step multiplies by, or divides by, one number for all elements."""
    first = (e for e in chain.equations if any(a is start for a in e.invars))
    others: list[list[Any]] = [
        [a for a in e.invars if a is not start and is_variable(a)]
        for e in first
        if e.primitive.name in ("mul", "div")
    ]
    return any(all(a.aval.size == 1 for a in atoms) for atoms in others)


def _has_casts(chain: _Chain) -> bool:
    return any(e.primitive.name == "convert_element_type" for e in chain.equations)


def _is_worth_it(chain: _Chain, tangents: set[Variable], costly: Costly) -> bool:
    factors = {
        atom
        for equation in chain.equations
        for atom in equation.invars
        if is_variable(atom) and atom not in tangents and costly(atom)
    }
    divisors = [e.invars[1] for e in chain.equations if e.primitive.name == "div"]
    divides = any(is_variable(divisor) and divisor in factors for divisor in divisors)
    return len(factors) > len(chain.ends) or divides
