"""Declared residual bytes: what a function's forward pass hands to its backward pass.

They are read off the jaxpr, before any compiler: what the program means to store, to be held
against what XLA then stores.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from ._tracing import inner_jaxprs, open_jaxpr, trace

# Calls that are looked through, by the parameter that holds the called jaxpr.
_CALLS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
# Equations whose results are their operands in other clothes, one for one.
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
# Equations that take a part of their first operand; of an argument it can be taken again.
_PARTS = {"dynamic_slice", "slice", "split"}


class NotDifferentiableError(ValueError):
    """JAX cannot take a function's gradient."""


@dataclass(frozen=True)
class Residual:
    """One value that waits for the backward pass.

    Attributes:
        shape: its shape.
        dtype: its dtype's name.
        nbytes: its size in bytes; sub-byte elements are packed, a bool takes a byte.
        scope: the JAX name scope of the equation that made it.
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    scope: str


@dataclass(eq=False)
class _Value:
    """A value of the flattened program; `scope` and `forward` say which equation made it."""

    aval: Any
    scope: str = ""
    forward: bool = False


@dataclass
class _Equation:
    inputs: list[_Value]
    outputs: list[_Value]
    backward: bool
    effects: bool
    one_of: bool = False
    inner: list[Jaxpr] = field(default_factory=list)


def declared_residual_bytes(fn: Callable[..., Any], *args: Any) -> int:
    """Bytes that `fn`'s forward pass declares to keep for its backward pass.

    If `fn` takes a gradient inside, as a training step does, these are the values made by an
    equation of the forward pass and read by one of the backward pass (an equation whose name
    stack says `transpose(`). If it does not, the same is counted for the pullback of `fn` with
    respect to its floating-point arguments.

    Each value counts once: `optimization_barrier`, `checkpoint_name`, reshapes, transposes and
    broadcasts of it are the same value. Not counted are `fn`'s arguments (parameters, batch) and
    parts of them, constants, values that nothing live reads, what `jax.checkpoint` recomputes,
    and values in host memory. A parameter that is cast to another dtype is a new value, and
    counts if the cast one is kept. A loop over micro-batches with the gradient inside counts one
    turn, a `cond` the branch whose gradient keeps most; stacked residuals of a differentiated
    `scan` count in full. For arguments sharded over devices this is the sum over the devices;
    inside `shard_map` it is one device's part.

    XLA may keep more, where the program does not pin what it means to keep, and also less, where
    one residual follows from another (a derivative of `tanh` from its result).

    Args:
        fn: any function of arrays.
        *args: its arguments: arrays, `jax.ShapeDtypeStruct`s or pytrees of them.

    Returns:
        Bytes; 4-bit and 2-bit elements are packed, a bool takes a byte.

    Raises:
        NotDifferentiableError: if `fn` takes no gradient and has none.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jax.ShapeDtypeStruct((8, 4), jnp.float32)
        >>> declared_residual_bytes(lambda x: jnp.sin(x).sum(), x)  # cos(x)
        128
    """
    return sum(residual.nbytes for residual in declared_residuals(trace(fn, *args).traced.jaxpr))


def declared_residuals(program: Any) -> list[Residual]:
    """The residuals that `declared_residual_bytes` counts, in the order they are made.

    Args:
        program: the function's jaxpr, from `jax.make_jaxpr` or a traced function.
    """
    if not _takes_gradient(open_jaxpr(program)):
        try:
            program = _pullback(program)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise NotDifferentiableError(f"fn has no gradient: {error}") from error
    return _residuals(open_jaxpr(program))


def _pullback(program: Any) -> Any:
    """The jaxpr of the function's pullback with respect to its floating-point arguments."""
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


def _takes_gradient(jaxpr: Jaxpr) -> bool:
    return any(
        _is_backward(equation) or any(map(_takes_gradient, inner_jaxprs(equation)))
        for equation in jaxpr.eqns
    )


def _is_backward(equation: JaxprEqn) -> bool:
    return "transpose(" in str(equation.source_info.name_stack)


def _residuals(jaxpr: Jaxpr) -> list[Residual]:
    equations: list[_Equation] = []
    given = [_Value(var.aval) for var in jaxpr.invars]
    results = _flatten(jaxpr, given, "", False, equations)
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
        if equation.one_of:  # branches, of which one is run
            bodies = [max(bodies, key=lambda found: sum(r.nbytes for r in found), default=[])]
        inner += [residual for found in bodies for residual in found]
    made = [value for equation in equations for value in equation.outputs if value in kept]
    found = [_residual(value) for value in made if not _on_host(value.aval)]
    return found + inner


def _flatten(
    jaxpr: Jaxpr,
    arguments: Sequence[_Value],
    scope: str,
    backward: bool,
    equations: list[_Equation],
) -> list[_Value]:
    """Appends the jaxpr's equations with calls looked through; returns the jaxpr's results."""
    values = dict(zip(jaxpr.invars, arguments, strict=True))
    values |= {var: _Value(var.aval) for var in jaxpr.constvars}

    def read(atom: Any) -> _Value:
        return _Value(atom.aval) if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        is_backward = backward or _is_backward(equation)
        stack = "/".join(filter(None, [scope, str(equation.source_info.name_stack)]))
        name = equation.primitive.name
        if name in _CALLS:
            called = open_jaxpr(equation.params[_CALLS[name]])
            outputs = _flatten(called, inputs, stack, is_backward, equations)
        elif name in _SAME_VALUE or _changes_nothing(equation):
            outputs = inputs[: len(equation.outvars)]
        else:
            is_constant = not inputs
            is_part = name in _PARTS and not inputs[0].forward
            forward = not (is_backward or is_constant or is_part)
            outputs = [_Value(var.aval, stack, forward) for var in equation.outvars]
            inner = [] if is_backward else list(inner_jaxprs(equation))
            effects, one_of = bool(equation.effects), name == "cond"
            equations.append(_Equation(inputs, outputs, is_backward, effects, one_of, inner))
        values |= dict(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _changes_nothing(equation: JaxprEqn) -> bool:
    """Whether a conversion leaves every value of its operand as it was."""
    avals: list[Any] = [atom.aval for atom in (*equation.invars, *equation.outvars)]
    if equation.primitive.name == "convert_element_type":
        return bool(avals[0].dtype == avals[-1].dtype)
    if equation.primitive.name == "reduce_precision":
        return bool(equation.params["mantissa_bits"] >= jnp.finfo(avals[0].dtype).nmant)
    return False


def _residual(value: _Value) -> Residual:
    bits = value.aval.size * _element_bits(value.aval.dtype)
    return Residual(value.aval.shape, str(value.aval.dtype), -(-bits // 8), value.scope)


def _element_bits(dtype: Any) -> int:
    """Bits that XLA stores for one element."""
    for kind, limits in ((jnp.integer, jnp.iinfo), (jnp.floating, jnp.finfo)):
        if jnp.issubdtype(dtype, kind):
            return int(limits(dtype).bits)
    return int(dtype.itemsize) * 8


def _on_host(aval: Any) -> bool:
    return "host" in str(getattr(aval, "memory_space", "")).lower()
