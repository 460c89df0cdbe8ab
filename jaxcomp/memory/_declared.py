"""Declared residuals: the values that a function's forward pass saves for its backward pass.

They are read from the jaxpr, before compilation. They are what the program intends to store. XLA
may store more or less.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxcomp.memory._origin import scopes_of
from jaxcomp.memory._source_line import is_of_library, source_line
from jaxcomp.memory._tracing import inner_jaxprs, open_jaxpr, trace

# Call primitives whose body is inlined, and the parameter that holds the called jaxpr.
_CALLS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
# Primitives whose outputs hold the same elements as their operands, one to one.
_SAME_VALUE = {
    "broadcast_in_dim",
    "copy",
    "expand_dims",
    "name",
    "optimization_barrier",
    "reshape",
    "sharding_constraint",
    "squeeze",
    "stop_gradient",
    "transpose",
}
# Primitives that return a part of their first operand. A part of an argument is not saved.
_PARTS = {"dynamic_slice", "slice", "split", "unstack"}


class NotDifferentiableError(ValueError):
    """JAX cannot differentiate a function."""


@dataclasses.dataclass(frozen=True)
class Residual:
    """One value that the forward pass saves for the backward pass.

    Attributes:
        shape: the shape of the value.
        dtype: the name of its dtype, for example `float32`.
        nbytes: its size in bytes. Elements of 2 or 4 bits are packed; a bool takes one byte.
        scope: the JAX name stack of the equation that computed it.
        source: `file:line` of the user code that computed it, or "" if it is not known.
        scopes: the names of the scopes in the name stack, outermost first.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxcomp import memory
        >>> x = jax.ShapeDtypeStruct((8, 4), jnp.float32)
        >>> (residual,) = memory.declared_residuals(jax.make_jaxpr(jnp.sin)(x))
        >>> residual.shape, residual.dtype, residual.nbytes
        ((8, 4), 'float32', 128)
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    scope: str
    source: str = ""
    scopes: tuple[str, ...] = ()


@dataclasses.dataclass(eq=False)
class _Value:
    """A value of the flattened program.

    Attributes:
        aval: the abstract value of JAX.
        stack: the name stack of the equation that computed it; `None` for arguments and constants.
        forward: whether an equation of the forward pass computed it.
        source: `file:line` of the user code that computed it, or "" if it is not known.
    """

    aval: Any
    stack: Any = None
    forward: bool = False
    source: str = ""


@dataclasses.dataclass
class _Equation:
    """An equation of the flattened program.

    Attributes:
        inputs: its operands.
        outputs: its results.
        backward: whether it belongs to the backward pass.
        effects: whether it has side effects.
        one_of: whether only one of the `inner` jaxprs runs.
        inner: the jaxprs of its loop bodies or branches.
    """

    inputs: list[_Value]
    outputs: list[_Value]
    backward: bool
    effects: bool
    one_of: bool = False
    inner: list[Jaxpr] = dataclasses.field(default_factory=list)


def declared_residual_bytes(fn: Callable[..., object], *args: object) -> int:
    """Counts the bytes that the forward pass of a function saves for its backward pass.

    The count is read from the jaxpr, so it describes the program before compilation.

    A training step computes a gradient inside. The count is then the size of the values that an
    equation of the forward pass computes and an equation of the backward pass reads. An equation
    belongs to the backward pass if its name stack contains `transpose(`. If `fn` computes no
    gradient, the count is that of its pullback with respect to its floating-point arguments.

    The rules of the count:

    - Each value counts once. An `optimization_barrier`, `checkpoint_name`, reshape, transpose or
      broadcast of a value is the same value.
    - The arguments of `fn` (parameters, batch), slices of them and constants do not count. An
      argument cast to another dtype is a new value.
    - Values that `jax.checkpoint` recomputes, values that are never used, and values in host
      memory do not count.
    - A loop whose body computes a gradient, for example over micro-batches, counts one iteration.
      The stacked residuals of a differentiated `scan` count in full.
    - A `cond` counts the branch whose gradient saves the most.
    - For sharded arguments the count is the sum over all devices. Inside `shard_map` it is the
      part of one device.

    XLA may store more, if no barrier fixes what the program saves. XLA may store less, if it can
    compute one residual from another.

    Args:
        fn: a function of arrays.
        *args: the arguments of `fn`: arrays, `jax.ShapeDtypeStruct`s, Flax NNX objects, or
            pytrees of them, of any shape and dtype.

    Returns:
        The number of bytes. Elements of 2 or 4 bits are packed; a bool takes one byte.

    Raises:
        ValueError: if `fn` computes no gradient inside and JAX cannot differentiate it.

    Example:
        The backward pass of `sin` needs `cos(x)`, which has 32 elements of 4 bytes.

        >>> import jax, jax.numpy as jnp
        >>> from jaxcomp import memory
        >>> x = jax.ShapeDtypeStruct((8, 4), jnp.float32)
        >>> memory.declared_residual_bytes(lambda x: jnp.sin(x).sum(), x)
        128
    """
    return sum(residual.nbytes for residual in declared_residuals(trace(fn, *args).traced.jaxpr))


def declared_residuals(program: ClosedJaxpr | Jaxpr) -> list[Residual]:
    """Lists the saved residuals that `declared_residual_bytes` counts.

    Args:
        program: the jaxpr of a function, from `jax.make_jaxpr(fn)(*args)` or
            `jax.jit(fn).trace(*args).jaxpr`.

    Returns:
        The residuals in the order in which the forward pass computes them. Those inside loop
        bodies and branches come last.

    Raises:
        ValueError: if the function computes no gradient inside and JAX cannot differentiate it.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxcomp import memory
        >>> def step(x):
        ...     return jax.grad(lambda x: jnp.sum(jnp.sin(x) ** 2))(x)
        >>> x = jax.ShapeDtypeStruct((8, 4), jnp.float32)
        >>> [residual.nbytes for residual in memory.declared_residuals(jax.make_jaxpr(step)(x))]
        [128, 128]
    """
    if not takes_gradient(open_jaxpr(program)):
        try:
            program = _pullback(program)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise NotDifferentiableError(f"fn has no gradient: {error}") from error
    return _residuals(open_jaxpr(program))


def _pullback(program: Any) -> Any:
    """Returns the jaxpr of the function's pullback with respect to its floating-point arguments."""
    function = jax.extend.core.jaxpr_as_fun(program)
    jaxpr = open_jaxpr(program)
    arguments, results = (
        [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in variables]
        for variables in (jaxpr.invars, jaxpr.outvars)
    )
    inputs, outputs = (
        [i for i, struct in enumerate(structs) if jnp.issubdtype(struct.dtype, jnp.inexact)]
        for structs in (arguments, results)
    )

    def gradients(values: list[Any], cotangents: list[Any]) -> Any:
        def differentiable(*chosen: Any) -> list[Any]:
            full = dict(enumerate(values)) | dict(zip(inputs, chosen, strict=True))
            made = function(*full.values())
            return [made[i] for i in outputs]

        _, pull = jax.vjp(differentiable, *[values[i] for i in inputs])
        return pull(cotangents)

    return jax.make_jaxpr(gradients)(arguments, [results[i] for i in outputs])


def takes_gradient(jaxpr: Jaxpr) -> bool:
    """Returns whether a program has a backward pass."""
    return any(
        _is_backward(equation) or any(map(takes_gradient, inner_jaxprs(equation)))
        for equation in jaxpr.eqns
    )


def _is_backward(equation: JaxprEqn) -> bool:
    return "transpose(" in str(equation.source_info.name_stack)


def _residuals(jaxpr: Jaxpr) -> list[Residual]:
    """Returns the values that forward equations compute and live backward equations read."""
    equations: list[_Equation] = []
    given = [_Value(var.aval) for var in jaxpr.invars]
    results = _flatten(jaxpr, given, source_info_util.NameStack(), "", False, equations)
    live = set(results)
    kept: set[_Value] = set()
    inner: list[Residual] = []
    for equation in reversed(equations):
        if not (equation.effects or live.intersection(equation.outputs)):
            continue
        live.update(equation.inputs)
        if equation.backward:
            kept.update(value for value in equation.inputs if value.forward)
        bodies = [_residuals(body) for body in equation.inner]
        if equation.one_of:
            bodies = [max(bodies, key=lambda found: sum(r.nbytes for r in found), default=[])]
        inner += [residual for found in bodies for residual in found]
    made = [value for equation in equations for value in equation.outputs if value in kept]
    found = [_residual(value) for value in made if not _on_host(value.aval)]
    return found + inner


def _flatten(
    jaxpr: Jaxpr,
    arguments: Sequence[_Value],
    scope: source_info_util.NameStack,
    source: str,
    backward: bool,
    equations: list[_Equation],
) -> list[_Value]:
    """Inlines the calls of a jaxpr.

    Args:
        jaxpr: the program.
        arguments: the values of its input variables.
        scope: the name stack of the call.
        source: the source line of all its equations; "" if they have their own.
        backward: whether the call belongs to the backward pass.
        equations: the list to which the equations are appended.

    Returns:
        The values of the jaxpr's output variables.
    """
    values = dict(zip(jaxpr.invars, arguments, strict=True))
    values |= {var: _Value(var.aval) for var in jaxpr.constvars}

    def read(atom: Any) -> _Value:
        return _Value(atom.aval) if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        is_backward = backward or _is_backward(equation)
        stack = scope + equation.source_info.name_stack
        line = source or source_line(equation)
        name = equation.primitive.name
        if name in _CALLS:
            called = open_jaxpr(equation.params[_CALLS[name]])
            # JAX traces a jitted function once and remembers the first caller's line.
            of_call = line if is_of_library(called) else source
            outputs = _flatten(called, inputs, stack, of_call, is_backward, equations)
        elif name in _SAME_VALUE or _changes_nothing(equation):
            outputs = inputs[: len(equation.outvars)]
        else:
            is_constant = not inputs
            is_part = name in _PARTS and not inputs[0].forward
            forward = not (is_backward or is_constant or is_part)
            outputs = [_Value(var.aval, stack, forward, line) for var in equation.outvars]
            inner = [] if is_backward else list(inner_jaxprs(equation))
            effects, one_of = bool(equation.effects), name == "cond"
            equations.append(_Equation(inputs, outputs, is_backward, effects, one_of, inner))
        values |= dict(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _changes_nothing(equation: JaxprEqn) -> bool:
    """Returns whether an equation is a conversion that preserves every value of its operand."""
    avals: list[Any] = [atom.aval for atom in (*equation.invars, *equation.outvars)]
    if equation.primitive.name == "convert_element_type":
        return bool(avals[0].dtype == avals[-1].dtype)
    if equation.primitive.name == "reduce_precision":
        return bool(equation.params["mantissa_bits"] >= jnp.finfo(avals[0].dtype).nmant)
    return False


def _residual(value: _Value) -> Residual:
    bits = value.aval.size * _element_bits(value.aval.dtype)
    dtype, nbytes = str(value.aval.dtype), -(-bits // 8)
    scopes = scopes_of(value.stack)
    return Residual(value.aval.shape, dtype, nbytes, str(value.stack), value.source, scopes)


def _element_bits(dtype: Any) -> int:
    """Returns the bits that XLA stores per element."""
    for kind, limits in ((jnp.integer, jnp.iinfo), (jnp.floating, jnp.finfo)):
        if jnp.issubdtype(dtype, kind):
            return int(limits(dtype).bits)
    return int(dtype.itemsize) * 8


def _on_host(aval: Any) -> bool:
    return "host" in str(getattr(aval, "memory_space", "")).lower()
