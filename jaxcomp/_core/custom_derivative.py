"""Functions with derivatives that are computed from a residual of our choice.

A `jax.custom_vjp` function is not enough where the residual depends on which arguments are
differentiated: in a traced program, JAX keeps one record of the residual's structure for all sets
of these, and the backward pass of one set would read the residual of another.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jax.extend.core import JaxprEqn

from jaxcomp._core import remat3
from jaxcomp._core.linear_map import ByPosition, linear_map

Choice = TypeVar("Choice")
_UNDIVIDED = "jaxcomp/undivided"  # the name of such a call in a program


class Differentiable(abc.ABC, Generic[Choice]):
    """A function of arrays that chooses what it saves by which arguments are differentiated.

    Calling it with a seed and arguments returns a list of results. The choice holds no arrays.
    """

    @abc.abstractmethod
    def evaluate(self, seed: Any, arguments: list[Any]) -> list[Any]:
        """Returns the results, where nothing is differentiated."""

    @abc.abstractmethod
    def choose(self, seed: Any, arguments: list[Any], differentiated: list[int]) -> Choice | None:
        """Returns what the passes below do for these differentiated arguments, by position.

        None: no result depends on these arguments differentiably.
        """

    @abc.abstractmethod
    def forward(self, choice: Choice, seed: Any, arguments: list[Any]) -> tuple[list[Any], Any]:
        """Returns the results and a residual, which is any pytree of arrays."""

    @abc.abstractmethod
    def backward(self, choice: Choice, residual: Any, cotangents: ByPosition) -> ByPosition:
        """Returns the cotangents of arguments, from those of results that are not zero."""

    def linear(self, choice: Choice, residual: Any, tangents: ByPosition) -> ByPosition:
        """Returns the tangents of results, from those of the differentiated arguments.

        Raises:
            TypeError: If the residual is encoded, as it is unless a subclass says otherwise.
        """
        raise reverse_mode_only()

    def __call__(self, seed: Any, *arguments: Any) -> list[Any]:
        """Returns the results, with derivatives in forward and in reverse mode."""

        def function(seed: Any, *arguments: Any) -> list[Any]:
            return self.evaluate(seed, [*arguments])

        @remat3.traced_without()
        def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            seed, *arguments = primals
            moves = {i: t for i, t in enumerate(tangents[1:]) if not isinstance(t, SymbolicZero)}
            choice = self.choose(seed, arguments, [*moves])
            if choice is None:
                results = derived(seed, *arguments)
                return results, list(map(_no_tangent, results))
            results, residual = self.forward(choice, seed, arguments)
            moved = linear_map(
                lambda residual, tangents: self.linear(choice, residual, tangents),
                lambda residual, cotangents: self.backward(choice, residual, cotangents),
                residual,
                _inexact(moves),
                _inexact(dict(enumerate(results))),
            )
            return results, [
                moved[i] if i in moved else _no_tangent(result) for i, result in enumerate(results)
            ]

        derived = jax.custom_jvp(function)
        derived.defjvp(rule, symbolic_zeros=True)
        return list(derived(seed, *arguments))


def reverse_mode_only() -> TypeError:
    """Returns the error of forward mode where values are encoded."""
    return TypeError(
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
    """Returns those that are floating-point or complex; an integer may come with a tangent, too."""
    return {i: v for i, v in values.items() if jnp.issubdtype(v.dtype, jnp.inexact)}
