"""Coefficients of the backward pass, made of what is stored."""

import contextlib
from collections.abc import Callable, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jaxtyping import Array, PyTree

from jaxcomp._core import barriers, platforms
from jaxcomp._core.shard_map import varying_axes
from jaxcomp.codecs import Encoded
from jaxcomp.transform._choice.graph import Graph
from jaxcomp.transform._choice.schedule import Coefficient, Schedule
from jaxcomp.transform._program.primitives import is_cheap, is_cheap_rule
from jaxcomp.transform._program.program import apply, scope_of, variables
from jaxcomp.transform._program.types import Atom, Equation, Variable, is_variable

Residual = dict[int, Any]
Codes = tuple[tuple[int, int], ...]  # which code of each saved value, by the value's id
Computed = dict[tuple[Variable, Codes], Array]  # coefficients, and steps towards them
_SMALL = 4096  # elements that need not wait for a cotangent
_PART = 256  # nor need what is so many times smaller than the largest saved value
_LITTLE = 16  # what is so many times smaller than a cotangent need not wait for it


class Rebuild:
    """Makes coefficients of what is stored, when a cotangent asks for them."""

    def __init__(self, schedule: Schedule, stored: Residual, arguments: dict[int, Array]) -> None:
        self._schedule = schedule
        self._values = list(schedule.stored)
        self._position = {value: i for i, value in enumerate(self._values)}
        largest = max((value.aval.size for value in self._values), default=0)
        self._small = max(_SMALL, largest // _PART)
        self._stored = stored
        invars = schedule.graph.program.arguments
        self._held = {invars[i]: value for i, value in arguments.items()}
        self._held |= dict(
            zip(schedule.graph.program.constants, schedule.graph.program.consts, strict=True)
        )
        self._segments = Segments(schedule.graph, {*self._held, *self._position})
        exact = (v for v in self._values if not schedule.stored[v].is_noisy)
        self._exact = {*self._held, *exact}
        self._find_exact()
        # Results, with their codes, of steps that are not taken twice.
        self._shared: Computed = {}

    def takes_steps(self, coefficient: Coefficient) -> bool:
        """Returns whether a coefficient is computed or copied from the host, not just read."""
        value = coefficient.value
        if not is_variable(value) or value in self._held:
            return False
        storing = self._schedule.stored.get(value)
        return storing is None or storing.codec is not None or storing.offload

    def plain(self, coefficient: Coefficient) -> Any:
        """Returns a coefficient, at once."""
        return self._compute(coefficient, {**self._held, **self._stored_inputs(coefficient)}, {})

    def after(
        self,
        cotangent: Array | None,
        evaluate: Callable[[Callable[[Coefficient], Array]], Any],
        coefficients: list[Coefficient],
        made: ShapedArray,
        *,
        is_fused: bool,
    ) -> Any:
        """Returns what `evaluate` makes of coefficients, no earlier than the cotangent is there.

        `made` is its shape and dtype.
        """
        inputs: dict[Variable, PyTree] = {}
        for coefficient in coefficients:
            inputs |= self._inputs(coefficient)
        waiting = {} if cotangent is None else _joining(cotangent, inputs)

        def decode(values: list[Array]) -> Any:
            arrived = dict(zip(waiting, map(_differentiable, values), strict=True))
            done: Computed = {}
            available = inputs | arrived
            return evaluate(lambda coefficient: self._compute(coefficient, available, done))

        leaves = list(waiting.values())
        if cotangent is None or not leaves:
            return decode(leaves)
        size = max(made.size, sum(jnp.size(leaf) for leaf in jax.tree.leaves(leaves)))
        if size <= self._small or (is_fused and size * _LITTLE <= cotangent.size):
            return decode(leaves)
        same_batch = cotangent.ndim == made.ndim > 0 and made.shape[0] == cotangent.shape[0]
        real = not any(jnp.issubdtype(a.dtype, jnp.complexfloating) for a in (made, cotangent))
        on_device = made.memory_space == jax.memory.Space.Device
        if is_fused and same_batch and real and on_device:
            return barriers.decode_after(cotangent, leaves, decode)
        if self._held.keys() >= waiting.keys():
            leaves, _ = platforms.no_barrier_on_tpu((leaves, cotangent))
        else:
            leaves, _ = barriers.barrier_together(leaves, cotangent)
        return decode(leaves)

    def _stored_inputs(self, coefficient: Coefficient) -> dict[Variable, PyTree]:
        return {k: v for k, v in self._inputs(coefficient).items() if k not in self._held}

    def _inputs(self, coefficient: Coefficient) -> dict[Variable, PyTree]:
        """Returns what is stored or held that a coefficient is computed from."""
        inputs: dict[Variable, PyTree] = {}
        numbers, codes = dict(coefficient.codes), _codes(coefficient)
        queue = [coefficient.value]
        seen = set()
        while queue:
            value = queue.pop()
            if not is_variable(value) or value in seen:
                continue
            seen.add(value)
            if value in self._held:
                inputs[value] = self._held[value]
            elif value in self._position:
                residual = self._stored[self._position[value]]
                several = isinstance(residual, tuple)  # codes, or decoded values
                inputs[value] = residual[numbers.get(value, 0)] if several else residual
            elif (value, codes) not in self._shared:
                queue += variables(self._defined(value)[0].invars)
        return inputs

    def _compute(
        self, coefficient: Coefficient, available: dict[Variable, PyTree], done: Computed
    ) -> Any:
        """Computes a coefficient from saved values and arguments, step by step.

        Args:
            coefficient: The coefficient.
            available: Saved values and arguments, as they came out of a barrier.
            done: Takes what is computed, for other coefficients of the same barrier.
        """
        if not is_variable(coefficient.value):
            return coefficient.value.val
        codes = _codes(coefficient)
        segments = self._segments

        def is_there(value: Variable) -> bool:
            if value in self._position or (value in self._held and value in available):
                return True
            return (value, codes) in self._shared or (value, codes) in done

        def read(atom: Atom) -> Any:
            if not is_variable(atom):
                return atom.val
            if atom in self._held and atom in available:
                return available[atom]
            if atom in self._position:
                return self._decode(atom, available[atom])
            shared = self._shared.get((atom, codes))
            return done[atom, codes] if shared is None else shared

        segment = segments.number(coefficient.value)
        stack = [] if is_there(coefficient.value) else [coefficient.value]
        while stack:
            equation, index = self._defined(stack[-1])
            missing = next((v for v in variables(equation.invars) if not is_there(v)), None)
            if missing is not None:
                stack.append(missing)
                continue
            value = stack.pop()
            result = apply(equation, list(map(read, equation.invars)))[index]
            done[value, codes] = result
            if not is_cheap(equation) or segments.is_shared(value, segment):
                self._shared[value, codes] = result
        return read(coefficient.value)

    def _find_exact(self) -> None:
        """Adds what is rebuilt from exact values alone, which a value with a code is not."""
        for value in self._schedule.graph.order:
            if value not in self._position and value not in self._exact:
                equation, _ = self._defined(value)
                if not equation.effects and self._exact.issuperset(variables(equation.invars)):
                    self._exact.add(value)

    def _defined(self, value: Variable) -> tuple[Equation, int]:
        """Returns the equation that computes a value, and which of its results that is.

        Where its operands are exact it is the function's own, so that a second derivative follows
        the rule of a `jax.custom_jvp` function, and JAX's own at ties.
        """
        graph = self._schedule.graph
        equation = graph.program.made_by.get(value)
        is_own = equation is not None and self._exact.issuperset(variables(equation.invars))
        if equation is not None and is_own and (is_cheap(equation) or is_cheap_rule(equation)):
            return equation, equation.outvars.index(value)
        defined = graph.defining_equation(value)
        assert defined is not None
        return defined

    def _decode(self, value: Variable, residual: PyTree) -> Any:
        storing = self._schedule.stored[value]
        if storing.offload:
            return jax.device_put(residual, jax.memory.Space.Device)
        if storing.codec is None:
            return residual
        (code,) = [residual] if isinstance(residual, Encoded) else residual
        equation = self._schedule.graph.program.made_by.get(value)
        with contextlib.nullcontext() if equation is None else scope_of(equation):
            return storing.codec.decode(barriers.on_device(code))


def _joining(cotangent: Array | None, inputs: dict[Variable, PyTree]) -> dict[Variable, PyTree]:
    """Returns the inputs that can share a barrier with a cotangent.

    What varies over fewer mesh axes, such as a parameter inside of `jax.shard_map`, would vary over
    those of the others once it has passed.
    """
    arrays = [cotangent, *jax.tree.leaves(list(inputs.values()))]
    axes = frozenset[str]().union(*map(varying_axes, arrays))
    return {
        key: value
        for key, value in inputs.items()
        if all(varying_axes(leaf) == axes for leaf in jax.tree.leaves(value))
    }


def _differentiable(value: Array) -> Any:
    """Returns what is saved, as it may be read where the backward pass is differentiated, too."""
    is_index = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.integer)
    return barriers.without_tangent(value) if is_index else value


def _codes(coefficient: Coefficient) -> Codes:
    return tuple(sorted((id(value), number) for value, number in coefficient.codes))


_LENGTH = 64  # steps


class Segments:
    """Divides what is recomputed by its distance, in steps, from what is saved or held.

    Cheap steps are recomputed for each coefficient anew as long as no chain of them is longer than
    a segment: XLA fuses them into the kernel that reads the coefficient. For longer chains that
    would take quadratic work. There the values that a later segment reads are kept once they are
    computed, and of the segment at hand all values. So each step is taken at most twice.

    Args:
        graph: The forward program.
        available: The values that are saved, held by the caller, or constant.
    """

    def __init__(self, graph: Graph, available: Set[Variable]) -> None:
        distance: dict[Any, int] = dict.fromkeys(available, 0)
        for value in graph.order:
            if value not in distance:
                operands = graph.operands(value)
                distance[value] = 1 + max((distance.get(v, 0) for v in operands), default=0)
        self._number = {value: steps // _LENGTH for value, steps in distance.items()}
        self._are_long = max(self._number.values(), default=0) > 0
        self._crossing: set[Any] = set()
        if self._are_long:
            for value in graph.order:
                later = (v for v in graph.operands(value) if self.number(v) < self.number(value))
                self._crossing.update(later)

    def number(self, value: Variable) -> int:
        """Returns the segment of a value; 0 is next to what is saved."""
        return self._number.get(value, 0)

    def is_shared(self, value: Variable, segment: int) -> bool:
        """Returns whether a value is kept once a coefficient of this segment needs it."""
        return self._are_long and (value in self._crossing or self.number(value) == segment)
