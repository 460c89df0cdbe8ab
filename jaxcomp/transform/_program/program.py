"""`Program`: a traced function as a list of equations, and how one is evaluated."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jaxtyping import Array, PyTree

from jaxcomp.memory._tracing import inner_jaxprs, open_jaxpr
from jaxcomp.transform._program.primitives import CHEAP, HEAVY, REDUCTIONS, is_cheap
from jaxcomp.transform._program.types import Atom, Equation, Variable, is_variable

V = TypeVar("V")  # an array, or what else stands for a value

# Calls that are looked through, by the parameter that holds what is called.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",  # of an inner jax.checkpoint, from JAX 0.12 on
    "remat_opt": "fwd_jaxpr",  # of a jax.custom_vjp with optimize_remat; it has no transpose
}
BODIES = {"scan": "jaxpr", "cond": "branches"}  # by the parameter that holds them
_NO_VARIABLES = (Literal, DropVar)
_SIMPLE = CHEAP | HEAVY | REDUCTIONS - {"reduce"}  # without programs among their parameters


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Static:
    """What is no array, in a pytree."""

    value: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A traced function: arguments, equations, results, and the constants that they read.

    Attributes:
        jaxpr: The equations, with the variables of arguments, constants and results.
        consts: The values of the constants.
    """

    jaxpr: Jaxpr
    consts: Sequence[Array] = ()

    @classmethod
    def of(cls, traced: Any) -> "Program":
        """Returns a jaxpr of JAX, with its constants if it has any."""
        return cls(open_jaxpr(traced), getattr(traced, "consts", ()))

    @classmethod
    def trace(cls, function: Callable[..., PyTree], *arguments: PyTree) -> "Program":
        """Returns a function of arrays as a program, for arguments of these shapes and dtypes."""
        return cls.of(jax.make_jaxpr(function)(*arguments))

    @property
    def closed(self) -> ClosedJaxpr:
        """The program in the class that JAX has for a jaxpr with constants."""
        return ClosedJaxpr(self.jaxpr, self.consts)

    @functools.cached_property
    def _inputs(self) -> list[Variable]:
        """The variables of the constants and of the arguments.

        From JAX 0.12 on, those of constants are arguments of a jaxpr without their values.
        """
        return cast(list[Variable], [*self.jaxpr.constvars, *self.jaxpr.invars])

    @property
    def arguments(self) -> list[Variable]:
        """The variables of the arguments."""
        return self._inputs[len(self.consts) :]

    @property
    def constants(self) -> list[Variable]:
        """The variables of the constants."""
        return self._inputs[: len(self.consts)]

    @property
    def equations(self) -> list[Equation]:
        """The equations, each after those whose results it reads."""
        return cast(list[Equation], self.jaxpr.eqns)

    @property
    def results(self) -> list[Atom]:
        """The results."""
        return cast(list[Atom], self.jaxpr.outvars)

    @functools.cached_property
    def made_by(self) -> dict[Variable, Equation]:
        """The equation that makes each variable."""
        return {v: e for e in self.equations for v in e.outvars if not isinstance(v, DropVar)}

    @functools.cached_property
    def readers(self) -> dict[Variable, list[Equation]]:
        """The equations that read each variable."""
        return readers_of(self.equations)

    def environment(self, arguments: Sequence[Any]) -> dict[Variable, Any]:
        """Returns the values of the variables that no equation makes, for some arguments."""
        variables = *self.constants, *self.arguments
        return dict(zip(variables, (*self.consts, *arguments), strict=True))

    def __call__(self, *arguments: Array) -> list[Array]:
        """Returns the results for some arguments."""
        return list(jaxpr_as_fun(self.closed)(*arguments))


def read(env: Mapping[Variable, Array], atom: Atom) -> Array:
    """Returns the value of a variable, or of a literal."""
    return env[atom] if is_variable(atom) else atom.val


def evaluate(
    program: Program,
    arguments: Sequence[V],
    step: Callable[[Equation, list[V]], Sequence[V]],
    read: Callable[[Mapping[Variable, V], Atom], V] = read,  # type: ignore[assignment]
) -> list[V]:
    """Takes a program's steps one by one.

    Args:
        program: The program.
        arguments: Its arguments: arrays, or what else stands for values.
        step: Takes an equation and its operands and returns its results, as `apply` does.
        read: Returns what stands for an atom.

    Returns:
        The program's results.
    """
    env: dict[Variable, Any] = program.environment(arguments)
    for equation in program.equations:
        operands = [read(env, atom) for atom in equation.invars]
        env |= dict(zip(equation.outvars, step(equation, operands), strict=True))
    return [read(env, atom) for atom in program.results]


def as_array(value: Array) -> Array:
    """Returns a value that was read, as an array.

    That of a literal is a scalar of Python or NumPy.
    """
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def variables(atoms: Sequence[Atom] | Sequence[Var | Literal]) -> list[Variable]:
    """Returns those of an equation's operands or results that are variables, each once."""
    found = dict.fromkeys([atom for atom in atoms if not isinstance(atom, _NO_VARIABLES)])
    return cast(list[Variable], list(found))


def apply(equation: Equation, operands: Sequence[Array]) -> list[Array]:
    """Evaluates one equation of a program, under its own name scope and source line."""
    if equation.primitive.name in _SIMPLE:
        with scope_of(equation), equation.ctx.manager:
            results = equation.primitive.bind(*operands, **equation.params)
        return list(results) if equation.primitive.multiple_results else [results]
    pairs = zip(equation.invars, operands, strict=True)
    values = {atom: value for atom, value in pairs if is_variable(atom)}
    alone = _empty().replace(
        invars=list(values),
        outvars=[v for v in equation.outvars if not isinstance(v, DropVar)],
        eqns=[equation],
        effects=equation.effects,
    )
    result_of = dict(zip(alone.outvars, Program(alone)(*values.values()), strict=True))
    return [cast(Array, result_of.get(variable)) for variable in equation.outvars]


@functools.cache
def _empty() -> Jaxpr:
    """Returns a jaxpr without equations."""
    return jax.make_jaxpr(lambda: ())().jaxpr


def called_program(equation: Equation) -> Program | None:
    """Returns the program that an equation calls; None if it asks for more, such as a sharding."""
    name = CALLS.get(equation.primitive.name)
    if name is None:
        return None
    for shardings in ("in_shardings", "out_shardings"):
        for sharding in equation.params.get(shardings, ()):
            if type(sharding).__name__ != "UnspecifiedValue":
                return None
    return Program.of(equation.params[name])


def has_loop(equation: JaxprEqn) -> bool:
    """Returns whether an equation is a loop, or calls a program with one."""
    return equation.primitive.name in ("scan", "while") or any(
        has_loop(inner) for jaxpr in inner_jaxprs(equation) for inner in jaxpr.eqns
    )


def scope_of(equation: Equation) -> Any:
    """Returns the context of an equation's name scope and source line."""
    info = equation.source_info
    stack = source_info_util.current_name_stack() + info.name_stack
    return source_info_util.user_context(info.traceback, name_stack=stack)


def avals(atoms: Sequence[Atom] | Sequence[Var | Literal]) -> list[ShapedArray]:
    """Returns shapes, dtypes and manual mesh axes of a program's arguments or results."""
    return [atom.aval for atom in cast(Sequence[Atom], atoms)]


def is_reference(atom: Atom) -> bool:
    """Returns whether an argument is a reference of `jax.new_ref`, not an array."""
    aval: object = atom.aval
    return isinstance(aval, jax.ref.AbstractRef)


def is_of_collective(effect: object) -> bool:
    """Returns whether an effect is that of a collective, which only names an axis."""
    return type(effect).__name__ == "NamedAxisEffect"


def is_placed(equation: Equation) -> bool:
    """Returns whether an equation says on which of several devices its result is.

    All values in a `jax.shard_map` are local.
    """
    for sharding in (equation.params.get("sharding"), equation.params.get("out_sharding")):
        mesh = getattr(sharding, "mesh", None)
        if sharding is None:
            continue
        if mesh is None or not (mesh.empty or mesh.size == 1 or mesh.are_all_axes_manual):
            return True
    return False


def with_bodies(equation: Equation, name: str, change: Callable[[Any], Any]) -> Equation:
    """Returns the same equation, with other programs in a parameter that holds one or several."""
    bodies = equation.params[name]
    changed = tuple(map(change, bodies)) if isinstance(bodies, tuple) else change(bodies)
    return equation.replace(params=equation.params | {name: changed})


def needed(equations: Sequence[Equation], results: Sequence[Atom]) -> list[Equation]:
    """Returns the equations that the wanted values take, and those with effects, in order."""
    live = set(variables(results))
    needed_equations = []
    for equation in reversed(equations):
        if equation.effects or live.intersection(equation.outvars):
            live.update(variables(equation.invars))
            needed_equations.append(equation)
    return needed_equations[::-1]


def passed(body: Program, call: Equation, values: Collection[Any]) -> list[Variable]:
    """Returns the arguments of a called program whose operands are among some variables."""
    operands = operands_of(body, call).items()
    return [v for v, atom in operands if is_variable(atom) and atom in values]


def operands_of(body: Program, call: Equation) -> dict[Variable, Atom]:
    """Returns what a call gives for each argument of the program that it calls.

    The last operands of a call are the program's; a conditional's first tells which branch it is.
    """
    operands = cast(Sequence[Atom], call.invars)
    return dict(zip(reversed(body.arguments), reversed(operands), strict=False))


def readers_of(equations: Iterable[Equation]) -> dict[Variable, list[Equation]]:
    """Returns the equations that read each value."""
    readers: dict[Variable, list[Equation]] = {}
    for equation in equations:
        for value in variables(equation.invars):
            readers.setdefault(value, []).append(equation)
    return readers


def fixed_values(program: Program) -> set[Variable]:
    """Returns the variables that are the same for every input, such as a causal mask.

    Cheap equations make them of literals.
    """
    fixed: set[Variable] = set()
    for equation in program.equations:
        cheap = is_cheap(equation) or equation.primitive.name == "pvary"
        if cheap and fixed.issuperset(variables(equation.invars)):
            fixed.update(equation.outvars)
    return fixed
