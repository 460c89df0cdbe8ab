"""Functions with derivatives that are computed from a residual of our choice.

A `jax.custom_vjp` function is not enough where the residual depends on which arguments are
differentiated: in a traced program, JAX keeps one record of the residual's structure for all sets
of these, and the backward pass of one set would read the residual of another.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jax.extend.core import JaxprEqn

from jaxcomp._core import remat3
from jaxcomp._core.linear_map import ByPosition, linear_map

K = TypeVar("K")
_UNDIVIDED = "jaxcomp/undivided"  # the name of such a call in a program


def with_derivative(
    function: Callable[..., list[Any]],
    prepare: Callable[[Any, list[Any], list[int]], K | None],
    forward: Callable[[K, Any, list[Any]], tuple[list[Any], Any]],
    linear: Callable[[K, Any, ByPosition], ByPosition],
    backward: Callable[[K, Any, ByPosition], ByPosition],
) -> Callable[..., list[Any]]:
    """Returns the function with derivatives in forward and in reverse mode.

    Args:
        function: From a seed and arguments to results.
        prepare: From the seed, the arguments and the positions of those that are differentiated to
            what `forward`, `linear` and `backward` share, which holds no arrays. None: no result
            depends on these arguments differentiably.
        forward: From what is shared, the seed and the arguments to the results and a residual, any
            pytree of arrays.
        linear: From what is shared, the residual and the arguments' tangents to the results'.
        backward: From what is shared, the residual and the results' cotangents to the arguments'.
            Cotangents that are zero are left out.
    """

    @remat3.traced_without()
    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        seed, *values = primals
        moves = {i: t for i, t in enumerate(tangents[1:]) if not isinstance(t, SymbolicZero)}
        shared = prepare(seed, values, [*moves])
        if shared is None:
            results = derived(seed, *values)
            return results, list(map(_no_tangent, results))
        results, residual = forward(shared, seed, values)
        moved = linear_map(
            lambda residual, tangents: linear(shared, residual, tangents),
            lambda residual, cotangents: backward(shared, residual, cotangents),
            residual,
            _inexact(moves),
            _inexact(dict(enumerate(results))),
        )
        return results, [
            moved[i] if i in moved else _no_tangent(result) for i, result in enumerate(results)
        ]

    derived = jax.custom_jvp(function)
    derived.defjvp(rule, symbolic_zeros=True)
    return derived


def reverse_mode_only(shared: Any, residual: Any, tangents: ByPosition) -> ByPosition:
    """What `with_derivative` takes for `linear` if the residual is encoded.

    Raises:
        TypeError: Always.
    """
    raise TypeError(
        "forward-mode differentiation (jax.jvp, jax.jacfwd, jax.hessian) reached values that "
        "jaxcomp saves encoded: codes have reverse mode only. Use jax.grad or jax.vjp, or the "
        "policy 'exact'"
    )


def undivided(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function that JAX does not evaluate in two parts, known and unknown.

    While JAX evaluates the rule of a `jax.custom_jvp` function in parts, it moves what is the same
    in all iterations out of loops: masks and indices, which would then be kept as whole arrays.

    Args:
        function: From pytrees of arrays to a pytree of arrays.
        *arguments: Its arguments.

    Returns:
        The function's result.
    """
    leaves, tree = jax.tree.flatten(arguments)

    def call(*leaves: Any) -> Any:
        return function(*jax.tree.unflatten(tree, leaves))

    call.__name__ = _UNDIVIDED

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        moves = _inexact({i: t for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)})

        def of_moved(*moved: Any) -> Any:
            by_position = dict(zip(moves, moved, strict=True))
            return call(*(by_position.get(i, value) for i, value in enumerate(primals)))

        return jax.jvp(of_moved, [primals[i] for i in moves], [*moves.values()])

    derived = jax.custom_jvp(call)
    derived.defjvp(rule, symbolic_zeros=True)
    return derived(*leaves)


def without_undivided(equation: JaxprEqn) -> JaxprEqn:
    """Returns the one equation of a call by `undivided`, and any other equation as it is."""
    if equation.primitive.name != "custom_jvp_call":
        return equation
    jaxpr = equation.params["call_jaxpr"].jaxpr
    return jaxpr.eqns[0] if jaxpr.debug_info.func_name == _UNDIVIDED else equation


def _no_tangent(result: Any) -> Any:
    return zero_from_primal(result, symbolic_zeros=True)


def _inexact(values: ByPosition) -> ByPosition:
    """Those that are floating-point or complex; an integer may come with a tangent, too."""
    return {i: v for i, v in values.items() if jnp.issubdtype(v.dtype, jnp.inexact)}
