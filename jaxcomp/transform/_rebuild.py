"""Coefficients of the backward pass, made of what is stored."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp._core import barriers
from jaxcomp.codecs import Encoded
from jaxcomp.transform._algebra import is_cheap
from jaxcomp.transform._programs import apply, is_variable
from jaxcomp.transform._schedule import Coefficient, Scheme

Residual = dict[int, Any]
_LITTLE = 16  # what is so many times smaller than a cotangent need not wait for it


class Rebuild:
    """Makes coefficients of what is stored, when a cotangent asks for them."""

    def __init__(self, scheme: Scheme, stored: Residual, arguments: dict[int, Any]) -> None:
        self._scheme = scheme
        self._values = list(scheme.stored)
        self._position = {value: i for i, value in enumerate(self._values)}
        self._stored = stored
        invars = scheme.graph.jaxpr.invars
        self._held = {invars[i]: value for i, value in arguments.items()}
        self._held |= dict(zip(scheme.graph.jaxpr.constvars, scheme.constants, strict=True))
        self._again: dict[Any, Any] = {}  # results of steps too costly to be taken twice

    def takes_steps(self, coefficient: Coefficient) -> bool:
        """Whether a coefficient is computed, not just read."""
        value = coefficient.value
        if not is_variable(value) or value in self._held:
            return False
        storing = self._scheme.stored.get(value)
        return storing is None or storing.codec is not None

    def plain(self, coefficient: Coefficient) -> Any:
        """A coefficient, at once."""
        return self._compute(coefficient, {**self._held, **self._stored_inputs(coefficient)}, {})

    def after(
        self,
        cotangent: Any,
        evaluate: Callable[[Callable[[Coefficient], Any]], Any],
        coefficients: list[Coefficient],
        made: Any,
        *,
        is_fused: bool,
    ) -> Any:
        """What `evaluate` makes of coefficients, no earlier than the cotangent is there.

        `made` is its shape and dtype.
        """
        inputs: dict[Any, Any] = {}
        for coefficient in coefficients:
            inputs |= self._inputs(coefficient)
        keys = list(inputs)

        def decode(values: list[Any]) -> Any:
            given = dict(zip(keys, values, strict=True))
            done: dict[Any, Any] = {}
            return evaluate(lambda coefficient: self._compute(coefficient, given, done))

        leaves = list(inputs.values())
        if cotangent is None or not leaves:
            return decode(leaves)
        read = sum(jnp.size(leaf) for leaf in jax.tree.leaves(leaves))
        if is_fused and max(made.size, read) * _LITTLE <= cotangent.size:
            return decode(leaves)
        alike = cotangent.ndim == made.ndim > 0 and made.shape[0] == cotangent.shape[0]
        real = not any(jnp.issubdtype(a.dtype, jnp.complexfloating) for a in (made, cotangent))
        if is_fused and alike and real:
            return barriers.decode_after(cotangent, leaves, decode)
        leaves, _ = barriers.barrier_together(leaves, cotangent)
        return decode(leaves)

    def _stored_inputs(self, coefficient: Coefficient) -> dict[Any, Any]:
        return {k: v for k, v in self._inputs(coefficient).items() if k not in self._held}

    def _inputs(self, coefficient: Coefficient) -> dict[Any, Any]:
        """What is stored or held that a coefficient is computed from."""
        found: dict[Any, Any] = {}
        numbers = dict(coefficient.codes)
        queue = [coefficient.value]
        seen = set()
        while queue:
            value = queue.pop()
            if not is_variable(value) or value in seen:
                continue
            seen.add(value)
            if value in self._held:
                found[value] = self._held[value]
            elif value in self._position:
                residual = self._stored[self._position[value]]
                coded = self._scheme.stored[value].codec is not None
                found[value] = residual[numbers.get(value, 0)] if coded else residual
            elif value not in self._again:
                queue += self._scheme.graph.operands(value)
        return found

    def _compute(
        self, coefficient: Coefficient, given: dict[Any, Any], done: dict[Any, Any]
    ) -> Any:
        numbers = dict(coefficient.codes)
        graph = self._scheme.graph

        def compute(value: Any) -> Any:
            if not is_variable(value):
                return value.val
            if value in self._held and value in given:
                return given[value]
            if value in self._position:
                return self._decode(value, given[value])
            if value in self._again:
                return self._again[value]
            key = value, tuple(sorted((id(v), n) for v, n in numbers.items()))
            if key not in done:
                defined = graph.defining_equation(value)
                assert defined is not None
                equation, index = defined
                made = apply(graph.jaxpr, equation, [compute(a) for a in equation.invars])
                done[key] = made[index]
                if not is_cheap(equation):
                    self._again[value] = made[index]
            return done[key]

        return compute(coefficient.value)

    def _decode(self, value: Any, residual: Any) -> Any:
        storing = self._scheme.stored[value]
        if storing.offload:
            return jax.device_put(residual, jax.memory.Space.Device)
        if storing.codec is None:
            return residual
        (code,) = [residual] if isinstance(residual, Encoded) else residual
        return storing.codec.decode(barriers.on_device(code))
