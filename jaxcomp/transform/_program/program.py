"""Programs as flat lists of equations."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import DropVar, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from jaxcomp.transform._program.primitives import (
    CHEAP,
    HEAVY,
    REDUCTIONS,
)

# Calls that are looked through, by the parameter that holds what is called.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",  # of an inner jax.checkpoint, from JAX 0.12 on
    "remat_opt": "fwd_jaxpr",  # of a jax.custom_vjp with optimize_remat; it has no transpose
}
BODIES = {"scan": "jaxpr", "cond": "branches"}  # by the parameter that holds them
_SIMPLE = CHEAP | HEAVY | REDUCTIONS - {"reduce"}  # without programs among their parameters

Program: TypeAlias = Any  # a jaxpr with its constants, in whichever class this JAX has for it
Values = dict[Any, Any]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Static:
    """What is no array, in a pytree."""

    value: Any


def read(env: Values, atom: Any) -> Any:
    """The value of a variable, or of a literal."""
    return atom.val if isinstance(atom, Literal) else env[atom]


def as_array(value: Any) -> Any:
    """A value that was read, as an array: that of a literal is a scalar of Python or NumPy."""
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def variables(atoms: Sequence[Any]) -> list[Any]:
    """Those of an equation's operands or results that are variables, each once."""
    return list(dict.fromkeys(a for a in atoms if not isinstance(a, Literal | DropVar)))


def closed(jaxpr: Jaxpr, constants: Sequence[Any]) -> Program:
    """A jaxpr with its constants."""
    return vars(jax.extend.core)["ClosedJaxpr"](jaxpr, constants)


def apply(jaxpr: Jaxpr, equation: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Evaluates one equation of a program, under its own name scope and source line."""
    if equation.primitive.name in _SIMPLE:
        with scope_of(equation), equation.ctx.manager:
            results = equation.primitive.bind(*values, **equation.params)
        return list(results) if equation.primitive.multiple_results else [results]
    pairs = zip(equation.invars, values, strict=True)
    operands = {atom: value for atom, value in pairs if not isinstance(atom, Literal)}
    given = variables(equation.invars)
    results = [v for v in equation.outvars if not isinstance(v, DropVar)]
    alone = jaxpr.replace(
        constvars=[],
        invars=given,
        outvars=results,
        eqns=[equation],
        effects=equation.effects,
    )
    made = iter(jaxpr_as_fun(closed(alone, []))(*[operands[v] for v in given]))
    return [None if isinstance(v, DropVar) else next(made) for v in equation.outvars]


def called_program(equation: JaxprEqn) -> Any:
    """The program that an equation calls; None if it asks for more, such as a sharding."""
    name = CALLS.get(equation.primitive.name)
    if name is None:
        return None
    for shardings in ("in_shardings", "out_shardings"):
        for sharding in equation.params.get(shardings, ()):
            if type(sharding).__name__ != "UnspecifiedValue":
                return None
    return equation.params[name]


def scope_of(equation: JaxprEqn) -> Any:
    """The context of an equation's name scope and source line, inside of the present one."""
    info = equation.source_info
    stack = source_info_util.current_name_stack() + info.name_stack
    return source_info_util.user_context(info.traceback, name_stack=stack)


def avals(atoms: Sequence[Any]) -> list[Any]:
    """Shapes, dtypes and manual mesh axes of a program's arguments or results."""
    return [atom.aval for atom in atoms]


def is_variable(atom: Any) -> bool:
    """Whether an operand is a variable, not a literal."""
    return isinstance(atom, Var)


def is_of_collective(effect: Any) -> bool:
    """Whether an effect is that of a collective, which names an axis and changes nothing."""
    return type(effect).__name__ == "NamedAxisEffect"


def is_placed(equation: JaxprEqn) -> bool:
    """Whether an equation says on which of several devices its result is.

    All values in a `jax.shard_map` are local.
    """
    for sharding in (equation.params.get("sharding"), equation.params.get("out_sharding")):
        mesh = getattr(sharding, "mesh", None)
        if sharding is None:
            continue
        if mesh is None or not (mesh.empty or mesh.size == 1 or mesh.are_all_axes_manual):
            return True
    return False


def with_bodies(equation: JaxprEqn, name: str, change: Callable[[Any], Any]) -> JaxprEqn:
    """The same equation, with other programs in a parameter that holds one or several."""
    bodies = equation.params[name]
    changed = tuple(map(change, bodies)) if isinstance(bodies, tuple) else change(bodies)
    return equation.replace(params=equation.params | {name: changed})


def needed(equations: Sequence[JaxprEqn], wanted: Sequence[Any]) -> list[JaxprEqn]:
    """The equations that the wanted values take, and those with effects, in order."""
    live = set(variables(wanted))
    kept = []
    for equation in reversed(equations):
        if equation.effects or live.intersection(equation.outvars):
            live.update(variables(equation.invars))
            kept.append(equation)
    return kept[::-1]


def readers_of(equations: Iterable[JaxprEqn]) -> dict[Any, list[JaxprEqn]]:
    """The equations that read each value."""
    readers: dict[Any, list[JaxprEqn]] = {}
    for equation in equations:
        for value in variables(equation.invars):
            readers.setdefault(value, []).append(equation)
    return readers
