"""Regions under `jax.checkpoint` that the backward pass evaluates again in slices."""

import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jaxcomp._core.custom_derivative import Differentiable
from jaxcomp._core.layouts import row_major_on_one_gpu
from jaxcomp._core.linear_map import ByPosition
from jaxcomp._core.shard_map import barrier_by_type
from jaxcomp.codecs._codec import Seed
from jaxcomp.transform._nested.regions import region_body
from jaxcomp.transform._nested.scheduled import Outer, ScheduledProgram
from jaxcomp.transform._program.types import Equation


class Kept(Differentiable[ScheduledProgram]):
    """A region whose operands wait; the backward pass evaluates it again from these.

    JAX's own backward pass of a region holds all that the region's derivative reads. This one holds
    a smallest set of values, and evaluates attentions in slices.
    """

    def __init__(self, equation: Equation, outer: Outer) -> None:
        """Reads the equation of a region in a program."""
        self._body = region_body(equation)
        self._outer = outer

    def evaluate(self, seed: Seed, arguments: list[Array]) -> list[Array]:
        """Returns the results of the region."""
        return self._body(*arguments)

    def choose(
        self, seed: Seed, arguments: list[Array], differentiated: list[int]
    ) -> ScheduledProgram:
        """Returns the schedule of the region's body, which encodes nothing."""
        active = [i for i in differentiated if jnp.issubdtype(arguments[i].dtype, jnp.inexact)]
        return self._outer.schedule(self._body, active, (), self._outer.context.of_region())

    def forward(
        self, choice: ScheduledProgram, seed: Seed, arguments: list[Array]
    ) -> tuple[list[Array], PyTree]:
        """Returns the results, and the operands.

        A loop stacks these. XLA for a GPU would copy the whole stack if its loops disagreed on the
        order of the elements.
        """
        results, _ = choice.forward(None, arguments)
        return results, list(map(row_major_on_one_gpu, arguments))

    def linear(
        self, choice: ScheduledProgram, residual: PyTree, tangents: ByPosition
    ) -> ByPosition:
        """Returns the tangents of the results."""
        _, stored = choice.forward(None, residual)
        return choice.linear(stored, tangents)

    def backward(
        self, choice: ScheduledProgram, residual: PyTree, cotangents: ByPosition
    ) -> ByPosition:
        """Returns the cotangents of the operands."""
        arguments = list(map(row_major_on_one_gpu, residual))
        arguments, cotangents = barrier_by_type((arguments, cotangents))
        _, (stored, used) = choice.forward(None, arguments)
        # Without this barrier XLA may keep a value beside the one that it was made of.
        stored, cotangents = barrier_by_type((stored, cotangents))
        return choice.backward((stored, used), cotangents)
