"""Programs as flat lists of equations, and a function's program beside that of its derivative."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import jax
import jax.extend.core
import jax.numpy as jnp
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import DropVar, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jaxtyping import Array

from jaxcomp.transform._algebra import CHEAP, HEAVY, REDUCTIONS
from jaxcomp.transform._origins import located

# Calls that are looked through, by the parameter that holds what is called.
CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr"}
_BARRIER = "optimization_barrier"
_SIMPLE = CHEAP | HEAVY | REDUCTIONS - {"reduce"}  # without programs among their parameters

Program: TypeAlias = Any  # a jaxpr with its constants, in whichever class this JAX has for it
Values = dict[Any, Any]
Visit = Callable[[JaxprEqn, list[Any], list[Any]], None]
Step = Callable[[Jaxpr, JaxprEqn, list[Any]], list[Any]]


def read(env: Values, atom: Any) -> Any:
    """The value of a variable, or of a literal."""
    return atom.val if isinstance(atom, Literal) else env[atom]


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


def evaluate(
    jaxpr: Jaxpr,
    constants: Sequence[Any],
    arguments: Sequence[Any],
    visit: Visit | None = None,
    known: dict[Hashable, list[Any]] | None = None,
    step: Step = apply,
) -> list[Any]:
    """Evaluates a program with calls looked through and equal equations evaluated once.

    Args:
        jaxpr: The program.
        constants: Values of its constants.
        arguments: Values of its arguments.
        visit: Is told of every equation with its operands and results.
        known: Results by equation; of the program that calls this one.
        step: Evaluates an equation.

    Returns:
        The results.
    """
    known = {} if known is None else known
    env: Values = dict(zip(jaxpr.constvars, constants, strict=True))
    env |= dict(zip(jaxpr.invars, arguments, strict=True))
    for equation in jaxpr.eqns:
        values = [read(env, atom) for atom in equation.invars]
        if _is_plain_call(equation):
            called = equation.params[CALLS[equation.primitive.name]]
            with scope_of(equation):
                inner = located(getattr(called, "jaxpr", called), equation)
                results = evaluate(inner, getattr(called, "consts", ()), values, visit, known, step)
        else:
            key = _key(equation, values)
            if key is None or key not in known:
                results = step(jaxpr, equation, values)
                if key is not None:
                    known[key] = [*results, values]  # operands stay alive, so do their ids
            else:
                results = known[key][:-1]
            if visit is not None:
                visit(equation, values, results)
        env |= dict(zip(equation.outvars, results, strict=True))
    return [read(env, atom) for atom in jaxpr.outvars]


def _is_plain_call(equation: JaxprEqn) -> bool:
    """Whether the equation calls a program and asks for nothing else, such as a sharding."""
    shardings = [
        sharding
        for name in ("in_shardings", "out_shardings")
        for sharding in equation.params.get(name, ())
    ]
    free = all(type(sharding).__name__ == "UnspecifiedValue" for sharding in shardings)
    return equation.primitive.name in CALLS and free


def scope_of(equation: JaxprEqn) -> Any:
    """The context of an equation's name scope and source line, inside of the present one."""
    info = equation.source_info
    stack = source_info_util.current_name_stack() + info.name_stack
    return source_info_util.user_context(info.traceback, name_stack=stack)


def _key(equation: JaxprEqn, values: list[Any]) -> Hashable | None:
    """What is equal for equations of equal results; None where there is no telling."""
    if equation.effects or equation.primitive.name == _BARRIER:
        return None
    operands = tuple(
        (str(atom.aval), repr(value)) if isinstance(atom, Literal) else id(value)
        for atom, value in zip(equation.invars, values, strict=True)
    )
    key = (equation.primitive, operands, tuple(sorted(equation.params.items(), key=lambda p: p[0])))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def flat(program: Program, visit: Visit | None = None) -> Program:
    """The same program with calls looked through and equal equations once."""
    return jax.make_jaxpr(
        lambda *arguments: evaluate(program.jaxpr, program.consts, arguments, visit)
    )(*avals(program.jaxpr.invars))


def avals(atoms: Sequence[Any]) -> list[Any]:
    """Shapes, dtypes and manual mesh axes of a program's arguments or results."""
    return [atom.aval for atom in atoms]


def filled(aval: Any, value: float) -> Array:
    """An array of one value, that varies over the mesh axes that `aval` varies over."""
    array = jnp.full(aval.shape, value, aval.dtype)
    varying = tuple(aval.manual_axis_type.varying)
    return lax.pcast(array, varying, to="varying") if varying else array


@dataclasses.dataclass(frozen=True)
class Linearized:
    """A function's forward program, and its derivative at a point as a linear program.

    Attributes:
        forward: From the function's arguments to its results and, after them, the coefficients.
        linear: From the coefficients and, after them, the tangents of the arguments that are
            differentiated, to the tangents of the results that are.
        results: Number of the function's results.
        active: The arguments that are differentiated.
        smooth: The results that have a tangent.
    """

    forward: Program
    linear: Program
    results: int
    active: tuple[int, ...]
    smooth: tuple[int, ...]

    @property
    def coefficients(self) -> list[Any]:
        """The variables of the forward program that are the linear one's coefficients."""
        count = len(self.linear.jaxpr.invars) - len(self.active)
        return list(self.forward.jaxpr.outvars[self.results :][:count])


def linearize(program: Program, active: Sequence[int]) -> Linearized:
    """Takes the derivative of a flat program with respect to some of its arguments.

    Every coefficient of the linear program is computed in the forward one, at the exact values.

    Raises:
        NotImplementedError: If the linear program writes to references.
    """
    arguments = avals(program.jaxpr.invars)
    results = avals(program.jaxpr.outvars)
    smooth = [i for i, r in enumerate(results) if jnp.issubdtype(r.dtype, jnp.inexact)]
    function = jaxpr_as_fun(program)
    linear: list[Jaxpr] = []  # without its constants, which are tracers of the forward program

    def both(*values: Any) -> Any:
        def at(*chosen: Any) -> Any:
            full = dict(enumerate(values)) | dict(zip(active, chosen, strict=True))
            made = function(*full.values())
            return [made[i] for i in smooth], made

        chosen = [values[i] for i in active]
        _, tangents, made = jax.linearize(at, *chosen, has_aux=True)
        traced = jax.make_jaxpr(tangents)(*[arguments[i] for i in active])
        linear.append(traced.jaxpr)
        return made, traced.consts

    forward = flat(jax.make_jaxpr(both)(*arguments))
    (opened,) = linear
    refs = [v for e in opened.eqns for v in e.outvars if isinstance(v.aval, jax.ref.AbstractRef)]
    if refs:
        raise NotImplementedError(
            f"fn keeps differentiated values in a reference of jax.new_ref ({refs[0].aval}): "
            "expected arrays alone; use x.at[...].set, or the carry of jax.lax.scan"
        )
    whole = closed(
        opened.replace(constvars=[], invars=[*opened.constvars, *opened.invars]),
        [],
    )
    return Linearized(forward, flat(whole), len(results), tuple(active), tuple(smooth))


def transpose(linearized: Linearized) -> Program:
    """The backward program: from coefficients and the results' cotangents to the arguments'."""
    linear = linearized.linear
    count = len(linear.jaxpr.invars) - len(linearized.active)
    coefficients, tangents = (
        avals(linear.jaxpr.invars[:count]),
        avals(linear.jaxpr.invars[count:]),
    )

    def backward(coefficients: list[Any], cotangents: list[Any]) -> Any:
        def pushed(*tangents: Any) -> list[Any]:
            return list(jaxpr_as_fun(linear)(*coefficients, *tangents))

        return jax.linear_transpose(pushed, *tangents)(cotangents)

    return flat(jax.make_jaxpr(backward)(coefficients, avals(linear.jaxpr.outvars)))


def is_variable(atom: Any) -> bool:
    """Whether an operand is a variable, not a literal."""
    return isinstance(atom, Var)
