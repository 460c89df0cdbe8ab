"""Models and programs in which nothing is encoded, to which diagnostics compare."""

import os
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.extend.core import JaxprEqn

from jaxcomp._core.modules import set_class, stock_class
from jaxcomp.nn._coded import coded_modules
from jaxcomp.transform._programs import CALLS, apply, avals, read, scope_of

M = TypeVar("M", bound=nnx.Module)

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_CHECKPOINTED = os.path.join(_PACKAGE, "transform") + os.sep  # of `checkpoint`


def exact_copy(model: M) -> M:
    """Copies a model without codecs: of its layers, around its blocks, or of its whole call."""
    copy = nnx.clone(model)
    for layer in coded_modules(copy).values():
        layer.codec = None
    for _, module in nnx.iter_modules(copy):
        if encodes(module):
            set_class(module, stock_class(module))
    return copy


def encodes(module: nnx.Module) -> bool:
    """Whether the class of a module encodes what its call saves."""
    return getattr(type(module), "encodes", False)


def without_codes(program: Any) -> Any:
    """A traced program without the backward passes of this package: JAX takes its own derivatives.

    They are found in calls of jitted functions, too, not in the bodies of loops and branches.
    """

    def run(called: Any, arguments: Sequence[Any]) -> list[Any]:
        jaxpr = called.jaxpr
        env = dict(zip(jaxpr.constvars, called.consts, strict=True))
        env |= dict(zip(jaxpr.invars, arguments, strict=True))
        for equation in jaxpr.eqns:
            values = [read(env, atom) for atom in equation.invars]
            inner = _looked_through(equation)
            if inner is None:
                made = apply(jaxpr, equation, values)
            else:
                with scope_of(equation):
                    made = run(inner, values)
            env |= dict(zip(equation.outvars, made, strict=True))
        return [read(env, atom) for atom in jaxpr.outvars]

    return jax.make_jaxpr(lambda *arguments: run(program, arguments))(*avals(program.jaxpr.invars))


def _looked_through(equation: JaxprEqn) -> Any:
    """The program that an equation calls, of a jitted function or one of this package, or None."""
    if equation.primitive.name in CALLS:
        return equation.params[CALLS[equation.primitive.name]]
    folder = {"custom_vjp_call": _PACKAGE, "custom_jvp_call": _CHECKPOINTED}.get(
        equation.primitive.name
    )
    if folder is None:
        return None
    called = equation.params["call_jaxpr"]
    file = called.jaxpr.debug_info.func_filename or ""
    return called if file.startswith(folder) else None
