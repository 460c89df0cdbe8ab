"""Regions under `jax.checkpoint` that the backward pass evaluates again by a schedule of ours."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jaxcomp._core.custom_derivative import Differentiable
from jaxcomp._core.layouts import row_major_on_one_gpu
from jaxcomp._core.linear_map import ByPosition
from jaxcomp._core.shard_map import barrier_by_type
from jaxcomp.codecs import noise
from jaxcomp.codecs._codec import Seed
from jaxcomp.transform._nested.regions import encodes_again, region_body
from jaxcomp.transform._nested.scheduled import Outer, ScheduledProgram
from jaxcomp.transform._program.types import Equation


class Kept(Differentiable[ScheduledProgram]):
    """A region whose operands wait; the backward pass evaluates it again from these.

    JAX's own backward pass of a region holds all that the region's derivative reads. This one holds
    a smallest set of values, and evaluates attentions in slices; or it holds codes, if regions are
    open in the region.
    """

    def __init__(
        self, equation: Equation, number: int, is_free: Sequence[bool], outer: Outer
    ) -> None:
        """Reads the equation of a region.

        Args:
            equation: The equation.
            number: One that tells the region's noise from that of others.
            is_free: Whether each operand is free to be had again.
            outer: The program that the region is in.
        """
        self._body = region_body(equation)
        self._number, self._is_free = number, is_free
        self._encodes = encodes_again(equation)
        context = outer.context
        self._context = context.of_encoding_region() if self._encodes else context.of_region()
        self._schedule = outer.schedule

    def evaluate(self, seed: Seed, arguments: list[Array]) -> list[Array]:
        """Returns the results of the region."""
        return self._body(*arguments)

    def choose(
        self, seed: Seed, arguments: list[Array], differentiated: list[int]
    ) -> ScheduledProgram:
        """Returns the schedule of the region's body."""
        active = [i for i in differentiated if jnp.issubdtype(arguments[i].dtype, jnp.inexact)]
        return self._schedule(self._body, active, (), self._context)

    def forward(
        self, choice: ScheduledProgram, seed: Seed, arguments: list[Array]
    ) -> tuple[list[Array], PyTree]:
        """Returns the results, and the operands."""
        operands = self._in_row_major(arguments)
        if self._encodes:
            return self.evaluate(seed, arguments), (noise.folded(seed, self._number), operands)
        results, _ = choice.forward(None, arguments)
        return results, (None, operands)

    def linear(
        self, choice: ScheduledProgram, residual: PyTree, tangents: ByPosition
    ) -> ByPosition:
        """Returns the tangents of the results."""
        seed, operands = residual
        _, stored = choice.forward(seed, operands)
        return choice.linear(stored, tangents)

    def backward(
        self, choice: ScheduledProgram, residual: PyTree, cotangents: ByPosition
    ) -> ByPosition:
        """Returns the cotangents of the operands."""
        seed, operands = residual
        arguments = self._in_row_major(operands)
        seed, arguments, cotangents = barrier_by_type((seed, arguments, cotangents))
        _, (stored, used) = choice.forward(seed, arguments)
        # Without this barrier XLA may keep a value beside the one that it was made of.
        stored, cotangents = barrier_by_type((stored, cotangents))
        return choice.backward((stored, used), cotangents)

    def _in_row_major(self, operands: list[Array]) -> list[Array]:
        """Returns the operands, with those in the order of rows that wait.

        A loop stacks these. XLA for a GPU would copy the whole stack if its loops disagreed on the
        order of the elements.
        """
        pairs = zip(operands, self._is_free, strict=True)
        return [value if free else row_major_on_one_gpu(value) for value, free in pairs]
