"""Programs in which nothing is encoded, to which codes are compared."""

import functools
import os
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from jaxcomp._core import barriers, custom_derivative
from jaxcomp.memory._tracing import CHECKPOINT_PRIMITIVES, inner_jaxprs, open_jaxpr
from jaxcomp.policies._save_compressed import codec_types
from jaxcomp.transform._program.custom_rules import has_rule_in
from jaxcomp.transform._program.program import (
    BODIES,
    CALLS,
    apply,
    avals,
    closed,
    read,
    scope_of,
    with_bodies,
)

_PACKAGE = os.path.dirname(os.path.dirname(barriers.__file__)) + os.sep

_DERIVATIVES = custom_derivative.__file__

_BARRIERS = barriers.__file__  # codes without a derivative


def without_codes(program: Any) -> Any:
    """A traced program without the backward passes of this package: JAX takes its own derivatives.

    They are found in calls of jitted functions, in `jax.checkpoint`, and in the bodies of scans and
    branches, not in those of other loops and of `jax.shard_map`.
    """

    def run(called: Any, arguments: Sequence[Any]) -> list[Any]:
        jaxpr = called.jaxpr
        env = dict(zip(jaxpr.constvars, called.consts, strict=True))
        env |= dict(zip(jaxpr.invars, arguments, strict=True))
        for equation in jaxpr.eqns:
            values = [read(env, atom) for atom in equation.invars]
            inner = _looked_through(equation)
            if inner is not None:
                with scope_of(equation):
                    made = run(inner, values)
            elif equation.primitive.name in CHECKPOINT_PRIMITIVES and _has_codes_inside(equation):
                again = functools.partial(run, closed(equation.params["jaxpr"], []))
                options = {key: equation.params[key] for key in ("prevent_cse", "policy")}
                with scope_of(equation):
                    made = jax.checkpoint(lambda *values, again=again: again(values), **options)(
                        *values
                    )
            else:
                made = apply(jaxpr, _without_codes_inside(equation), values)
            env |= dict(zip(equation.outvars, made, strict=True))
        return [read(env, atom) for atom in jaxpr.outvars]

    return jax.make_jaxpr(lambda *arguments: run(program, arguments))(*avals(program.jaxpr.invars))


def has_codes(program: Any) -> bool:
    """Whether a traced program has a backward pass of this package."""
    return any(
        _is_ours(equation) or _has_codes_inside(equation) for equation in open_jaxpr(program).eqns
    )


def saves_codes(gradient: Any) -> bool:
    """Whether a traced gradient saves a value in a form that is not exact, or a mask in bits."""
    kinds = [kind for kind in codec_types() if hasattr(kind, "name") and not kind.is_exact]
    names = {kind.stored_name() for kind in kinds}

    def saves(program: Any) -> bool:
        return any(
            (equation.primitive.name == "name" and equation.params["name"] in names)
            or any(map(saves, inner_jaxprs(equation)))
            for equation in open_jaxpr(program).eqns
        )

    return saves(gradient)


def _has_codes_inside(equation: JaxprEqn) -> bool:
    return any(map(has_codes, inner_jaxprs(equation)))


def _without_codes_inside(equation: JaxprEqn) -> JaxprEqn:
    """The same equation, with other bodies of a scan or branches."""
    name = BODIES.get(equation.primitive.name)
    if name is None or not _has_codes_inside(equation):
        return equation
    return with_bodies(equation, name, without_codes)


def _looked_through(equation: JaxprEqn) -> Any:
    """The program that an equation calls, of a jitted function or one of this package, or None."""
    if equation.primitive.name in CALLS:
        return equation.params[CALLS[equation.primitive.name]]
    return equation.params["call_jaxpr"] if _is_ours(equation) or _is_barrier(equation) else None


def _is_ours(equation: JaxprEqn) -> bool:
    """Whether an equation has a derivative of this package."""
    start = {"custom_vjp_call": _PACKAGE, "custom_jvp_call": _DERIVATIVES}
    name = equation.primitive.name
    return name in start and has_rule_in(equation, start[name])


def _is_barrier(equation: JaxprEqn) -> bool:
    return equation.primitive.name == "custom_jvp_call" and has_rule_in(equation, _BARRIERS)
