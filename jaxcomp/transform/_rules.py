"""Functions with derivatives that are computed from a residual of our choice."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, zero_from_primal

from jaxcomp._core import remat3
from jaxcomp.transform._linear_map import ByPosition, linear_map
from jaxcomp.transform._programs import Static

Forward = Callable[[Any, list[Any], list[int]], tuple[list[Any], Any, Any]]
Linear = Callable[[Any, Any, ByPosition], ByPosition]


def with_both_modes(
    function: Callable[..., list[Any]], forward: Forward, linear: Linear, backward: Linear
) -> Callable[..., list[Any]]:
    """The function with derivatives in forward and in reverse mode.

    Args:
        function: From a seed and arguments to results.
        forward: From the seed, the arguments and which of these have a tangent, to the results,
            what else is known before (None: no result has a tangent), and a residual of arrays.
        linear: From what is known, the residual and the arguments' tangents to the results'.
        backward: From what is known, the residual and the results' cotangents to the arguments'.
    """

    @remat3.traced_without()
    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        seed, *values = primals
        moves = {i: t for i, t in enumerate(tangents[1:]) if not isinstance(t, SymbolicZero)}
        made, known, residual = forward(seed, values, [*moves])
        moved: ByPosition = {}
        if known is not None:
            moved = linear_map(
                lambda residual, tangents: linear(known, residual, tangents),
                lambda residual, cotangents: backward(known, residual, cotangents),
                residual,
                _smooth(moves),
                _smooth(dict(enumerate(made))),
            )
        return made, [
            moved[i] if i in moved else zero_from_primal(result, symbolic_zeros=True)
            for i, result in enumerate(made)
        ]

    derived = jax.custom_jvp(function)
    derived.defjvp(rule, symbolic_zeros=True)
    return derived


def with_reverse_mode(
    function: Callable[..., list[Any]], forward: Forward, backward: Linear, arguments: int
) -> Callable[..., list[Any]]:
    """As `with_both_modes`, for a residual that forward mode cannot use.

    Also takes the number of arguments.
    """

    @remat3.traced_without()
    def save(seed: Any, *operands: Any) -> tuple[list[Any], Any]:
        perturbed = [i for i, operand in enumerate(operands) if operand.perturbed]
        values = [operand.value for operand in operands]
        made, known, residual = forward(None if seed is None else seed.value, values, perturbed)
        return made, (Static(known), residual)

    @remat3.traced_without()
    def give(saved: Any, cotangents: list[Any]) -> tuple[Any, ...]:
        known, residual = saved
        found: ByPosition = {}
        if known.value is not None:
            arrived = {i: c for i, c in enumerate(cotangents) if not isinstance(c, SymbolicZero)}
            found = backward(known.value, residual, arrived)
        return None, *(found.get(i) for i in range(arguments))

    derived = jax.custom_vjp(function)
    derived.defvjp(save, give, symbolic_zeros=True)
    return derived


def _smooth(values: ByPosition) -> ByPosition:
    """Those that are floating-point numbers; an integer may come with a tangent, too."""
    return {i: v for i, v in values.items() if jnp.issubdtype(v.dtype, jnp.inexact)}
