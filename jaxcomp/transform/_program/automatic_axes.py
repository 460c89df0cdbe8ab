"""Programs of meshes with explicit axes, as programs of the same mesh with automatic axes.

Types of arrays carry their sharding over explicit axes, and each operation has a rule for that of
its result. Codes have no such rules. So a program is rewritten for automatic axes: where it asks
for a sharding, the value gets a sharding constraint, and XLA finds the rest.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend import linear_util
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jaxcomp._core.explicit import automatic_mesh, explicit_axes, explicit_axes_of, spec_of
from jaxcomp.transform._program.program import Program, apply, avals, evaluate, scope_of
from jaxcomp.transform._program.types import Equation

_SHARDINGS = ("out_sharding", "sharding", "dst_sharding")


def run_over_automatic_axes(
    program: Program, run: Callable[..., list[Array]], arguments: Sequence[Array]
) -> list[Any]:
    """Runs what is made of a program of explicit axes over automatic ones.

    Args:
        program: The program.
        run: A function of the program over automatic axes and of its arguments.
        arguments: The program's.

    Returns:
        The results, with the shardings of the program's.
    """
    specs = [spec_of(aval) for aval in avals(program.results)]

    def inner(*values: Array) -> list[Any]:
        return run(rewriter.program(program), *values)

    rewriter = _rewriter()
    over = jax.sharding.auto_axes(inner, axes=explicit_axes(), out_sharding=specs)
    return list(over(*map(_on_mesh, arguments)))


def _on_mesh(array: Array) -> Any:
    """Returns an array on no mesh, such as a new parameter, replicated on the present mesh."""
    if not isinstance(array, jax.Array) or not jax.typeof(array).sharding.mesh.empty:
        return array
    return jax.sharding.reshard(array, PartitionSpec(*[None] * array.ndim))


@contextlib.contextmanager
def automatic(program: Program) -> Iterator[Program]:
    """Returns the same program over automatic axes, in whose context nothing can be run."""
    if not explicit_axes():
        yield program
        return
    rewriter = _rewriter()
    with jax.sharding.use_abstract_mesh(rewriter.automatic):
        yield rewriter.program(program)


def _rewriter() -> "_Rewriter":
    """Returns the rewriter of the mesh of the present context."""
    return _Rewriter(jax.sharding.get_abstract_mesh(), automatic_mesh())


class _Rewriter:
    """Rewrites programs.

    Attributes:
        explicit: The mesh with the explicit axes.
        automatic: The same with automatic axes.
    """

    def __init__(self, explicit: AbstractMesh, automatic: AbstractMesh) -> None:
        self.explicit, self.automatic = explicit, automatic
        with jax.sharding.use_abstract_mesh(self.automatic):
            self._context = jax.make_jaxpr(jax.numpy.sin)(1.0).eqns[0].ctx

    def program(self, program: Program) -> Program:
        """Returns the same program over automatic axes."""
        structs = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type)
            for a in avals(program.arguments)
        ]
        with jax.sharding.use_abstract_mesh(self.automatic):
            return Program.trace(functools.partial(self.run, program), *structs)

    def run(self, program: Program, *arguments: Array) -> list[Any]:
        """Evaluates a program over automatic axes."""

        def step(equation: Equation, operands: list[Array]) -> list[Any]:
            with scope_of(equation):
                return self._results(equation, operands)

        return evaluate(program, arguments, step)

    def _results(self, equation: Equation, values: list[Array]) -> list[Any]:
        if equation.primitive.name == "mesh_cast":  # to or from automatic axes
            return values
        if not explicit_axes_of(equation.ctx.cur_abstract_mesh):
            return apply(equation, values)
        asked = next((equation.params[k] for k in _SHARDINGS if equation.params.get(k)), None)
        if equation.primitive.name == "reshard":
            return [_constrained(values[0], asked)]
        if equation.primitive.name == "shard_map":
            return self._of_shard_map(equation, values)
        params = {name: self._rewritten(name, p) for name, p in equation.params.items()}
        if "bwd" in params:
            params["bwd"] = self._backward(equation)
        rewritten = equation.replace(params=params, ctx=self._context)
        results = apply(rewritten, values)
        return [_constrained(value, asked) for value in results] if asked else results

    def _rewritten(self, name: str, parameter: Any) -> Any:
        if name in _SHARDINGS:
            return None
        if isinstance(parameter, ClosedJaxpr):
            return self.program(Program.of(parameter)).closed
        if isinstance(parameter, Jaxpr):
            return self.program(Program(parameter)).jaxpr
        if isinstance(parameter, tuple) and any(isinstance(p, ClosedJaxpr) for p in parameter):
            return tuple(self.program(Program.of(p)).closed for p in parameter)
        if name in ("jvp_jaxpr_fun", "fwd_jaxpr_thunk"):
            return self._rule(parameter)
        return parameter

    def _rule(self, rule: Any) -> Any:
        """Returns a rule that JAX traces later.

        With the types of the explicit axes, which it has.
        """

        def traced(*zeros: bool) -> tuple[Any, ...]:
            with jax.sharding.use_abstract_mesh(self.explicit):
                jaxpr, constants, *rest = rule.call_wrapped(*zeros)
            program = self.program(Program(jaxpr, constants))
            return program.jaxpr, program.consts, *rest

        return linear_util.wrap_init(traced, debug_info=rule.debug_info)

    def _backward(self, equation: Equation) -> Any:
        """Returns the backward rule of a `jax.custom_vjp`; it runs over explicit axes."""
        rule, forward = equation.params["bwd"], equation.params["fwd_jaxpr_thunk"]
        operands = [atom.aval for atom in equation.invars]

        def of_values(*values: Array) -> Any:
            with jax.sharding.use_abstract_mesh(self.explicit):
                jaxpr, *_ = forward.call_wrapped(*[True] * len(operands))
                outputs = iter(atom.aval for atom in jaxpr.outvars)
                forwarded = equation.params["out_trees"]()[2]
                residuals = [next(outputs) if i is None else operands[i] for i in forwarded]
                results = [variable.aval for variable in equation.outvars]
                program, shape = jax.make_jaxpr(rule.call_wrapped, return_shape=True)(
                    *map(_struct, (*residuals, *results))
                )
            return jax.tree.unflatten(
                jax.tree.structure(shape), self.run(Program.of(program), *values)
            )

        return linear_util.wrap_init(of_values, debug_info=rule.debug_info)

    def _of_shard_map(self, equation: Equation, values: list[Array]) -> list[Any]:
        params = equation.params

        def body(*arguments: Array) -> list[Any]:
            inner = _Rewriter(self.explicit, jax.sharding.get_abstract_mesh())
            return inner.run(Program(params["jaxpr"]), *arguments)

        mapped = jax.shard_map(
            body,
            in_specs=tuple(params["in_specs"]),
            out_specs=list(params["out_specs"]),
            axis_names=set(params["newly_manual_axes"]),
            check_vma=params["check_vma"],
        )
        return list(mapped(*values))


def _struct(aval: ShapedArray) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=aval.sharding)


def _constrained(value: Array, sharding: Any) -> Any:
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    return jax.lax.with_sharding_constraint(value, spec)
