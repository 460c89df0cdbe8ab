"""Programs in which nothing is encoded, to which codes are compared."""

import functools
from typing import Any

import jax
from jax.extend.core import Jaxpr
from jaxtyping import Array

from jaxcomp._core import barriers, custom_derivative
from jaxcomp.memory._tracing import CHECKPOINT_PRIMITIVES, inner_jaxprs, open_jaxpr
from jaxcomp.policies._save_compressed import codec_types
from jaxcomp.transform._program.custom_rules import PACKAGE, has_rule_in
from jaxcomp.transform._program.program import (
    BODIES,
    CALLS,
    Program,
    apply,
    avals,
    evaluate,
    scope_of,
    with_bodies,
)
from jaxcomp.transform._program.types import Equation

_DERIVATIVES = custom_derivative.__file__
_BARRIERS = barriers.__file__  # codes without a derivative


def without_codes(program: Program) -> Program:
    """Returns a traced program without the backward passes of this package.

    JAX takes its own derivatives.

    They are found in calls of jitted functions, in `jax.checkpoint`, and in the bodies of scans and
    branches, not in those of other loops and of `jax.shard_map`.
    """

    def run(called: Program, *arguments: Array) -> list[Any]:
        return evaluate(called, arguments, step)

    def step(equation: Equation, operands: list[Array]) -> list[Any]:
        called = _looked_through(equation)
        with scope_of(equation):
            if called is not None:
                return run(called, *operands)
            if equation.primitive.name in CHECKPOINT_PRIMITIVES and _has_codes_inside(equation):
                again = functools.partial(run, Program.of(equation.params["jaxpr"]))
                options = {key: equation.params[key] for key in ("prevent_cse", "policy")}
                return list(jax.checkpoint(again, **options)(*operands))
        return apply(_without_codes_inside(equation), operands)

    return Program.trace(functools.partial(run, program), *avals(program.arguments))


def has_codes(program: Any) -> bool:
    """Returns whether a traced program has a backward pass of this package."""
    return any(
        _is_ours(equation) or _has_codes_inside(equation) for equation in open_jaxpr(program).eqns
    )


def saves_codes(gradient: Any) -> bool:
    """Returns whether a traced gradient saves an inexact form of a value, or a mask in bits."""
    kinds = [kind for kind in codec_types() if hasattr(kind, "name") and not kind.is_exact]
    names = {kind.stored_name() for kind in kinds}

    def saves(program: Program | Jaxpr) -> bool:
        return any(
            (equation.primitive.name == "name" and equation.params["name"] in names)
            or any(map(saves, inner_jaxprs(equation)))
            for equation in open_jaxpr(program).eqns
        )

    return saves(gradient)


def _has_codes_inside(equation: Equation) -> bool:
    return any(map(has_codes, inner_jaxprs(equation)))


def _without_codes_inside(equation: Equation) -> Equation:
    """Returns the same equation, with other bodies of a scan or branches."""
    name = BODIES.get(equation.primitive.name)
    if name is None or not _has_codes_inside(equation):
        return equation
    return with_bodies(equation, name, lambda body: without_codes(Program.of(body)).closed)


def _looked_through(equation: Equation) -> Program | None:
    """Returns the program of a call of a jitted function or one of this package, or None."""
    name = CALLS.get(equation.primitive.name)
    if name is None and (_is_ours(equation) or _is_barrier(equation)):
        name = "call_jaxpr"
    return None if name is None else Program.of(equation.params[name])


def _is_ours(equation: Equation) -> bool:
    """Returns whether an equation has a derivative of this package."""
    start = {"custom_vjp_call": PACKAGE, "custom_jvp_call": _DERIVATIVES}
    name = equation.primitive.name
    return name in start and has_rule_in(equation, start[name])


def _is_barrier(equation: Equation) -> bool:
    return equation.primitive.name == "custom_jvp_call" and has_rule_in(equation, _BARRIERS)
