"""Regions under `jax.checkpoint` that are evaluated again from encoded inputs."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, PyTree

from jaxcomp._core.custom_derivative import Differentiable
from jaxcomp._core.linear_map import ByPosition
from jaxcomp.codecs import Codec, noise
from jaxcomp.codecs._codec import Seed
from jaxcomp.policies.recipes import boundary
from jaxcomp.transform._nested.regions import is_sliced, region_alone, region_body
from jaxcomp.transform._nested.scheduled import Nested, Outer
from jaxcomp.transform._program.program import variables
from jaxcomp.transform._program.types import Equation


class Bounded(Differentiable[Nested]):
    """A region whose inputs wait as codes; the backward pass evaluates it again from these."""

    def __init__(
        self, equation: Equation, number: int, is_free: Sequence[bool], outer: Outer, codec: Codec
    ) -> None:
        """Reads the equation of a region.

        Args:
            equation: The equation.
            number: One that tells the region's noise from that of others.
            is_free: Whether each operand is free to be had again.
            outer: The program that the region is in.
            codec: Encodes the operands that are not free.
        """
        is_in_slices = is_sliced(equation, variables(equation.invars), outer.context.limits)
        self._body = region_alone(equation) if is_in_slices else region_body(equation)
        self._number, self._outer = number, outer
        self._coded = [i for i, free in enumerate(is_free) if not free]
        rules = boundary(codec).rules
        optional = tuple(dataclasses.replace(rule, required=False) for rule in rules)
        policy = dataclasses.replace(boundary(codec), rules=optional)
        self._context = dataclasses.replace(outer.context, policy=policy)

    def evaluate(self, seed: Seed, arguments: list[Array]) -> list[Array]:
        """Returns the results of the region."""
        return self._body(*arguments)

    def choose(self, seed: Seed, arguments: list[Array], differentiated: list[int]) -> Nested:
        """Returns the schedule of the region's body."""
        active = [i for i in differentiated if jnp.issubdtype(arguments[i].dtype, jnp.inexact)]
        body = self._outer.schedule(self._body, active, self._coded, self._context)
        return self._outer.noted(Nested((body,), 1))

    def forward(
        self, choice: Nested, seed: Seed, arguments: list[Array]
    ) -> tuple[list[Array], PyTree]:
        """Returns the results, the codes, and the operands that are free."""
        (body,) = choice.programs
        results, (stored, used) = body.forward(noise.folded(seed, self._number), arguments)
        operands = {i: value for i, value in used.items() if i < len(arguments)}
        inside = {i: value for i, value in used.items() if i not in operands}
        # No policy decides about values that are ours by this name.
        saved = jax.tree.map(lambda leaf: checkpoint_name(leaf, choice.name), (stored, inside))
        return results, (saved, operands)

    def backward(self, choice: Nested, residual: PyTree, cotangents: ByPosition) -> ByPosition:
        """Returns the cotangents of the operands."""
        (body,) = choice.programs
        (stored, inside), operands = residual
        return body.backward((stored, inside | operands), cotangents)
