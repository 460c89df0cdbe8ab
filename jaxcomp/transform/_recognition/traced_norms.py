"""Norms of groups of elements, with the formulas of a program."""

import dataclasses
import itertools
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxcomp.ops._norm import average, shares
from jaxcomp.ops._norm_curve import Normalization
from jaxcomp.transform._program.program import Program
from jaxcomp.transform._recognition.batch_norms import evaluated


@dataclasses.dataclass(frozen=True)
class Groups:
    """Which elements of an array have a statistic in common.

    Attributes:
        shape: Shape of the array.
        factors: The lengths of the factors of each axis, and whether groups differ along each.
        axes: Axes along which wide arrays are of size 1.
    """

    shape: tuple[int, ...]
    factors: tuple[tuple[tuple[int, bool], ...], ...]
    axes: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many elements have a statistic in common."""
        return math.prod(size for axis in self.factors for size, kept in axis if not kept)

    @property
    def wide_count(self) -> int:
        """How many elements of a wide array have a statistic in common."""
        return math.prod(size for size, kept in self._wide_factors if not kept)

    @property
    def _wide_factors(self) -> list[tuple[int, bool]]:
        """The factors of a wide array."""
        return [
            (1 if i in self.axes else size, kept)
            for i, axis in enumerate(self.factors)
            for size, kept in axis
        ]

    @property
    def _wide_shape(self) -> list[int]:
        return [1 if i in self.axes else size for i, size in enumerate(self.shape)]

    def operand(self, value: Array, counts: tuple[int, ...]) -> Array:
        """Returns an operand of the array, as one of a wide array.

        Args:
            value: The operand, which is constant along `axes`.
            counts: How many factors of the array each axis of the operand is.
        """
        sizes = [size for size, _ in self._wide_factors]
        pending = iter(sizes)
        parts = [list(itertools.islice(pending, count)) for count in counts]
        ends = [min(n, math.prod(part)) for n, part in zip(value.shape, parts, strict=True)]
        narrow = lax.slice(value, [0] * value.ndim, ends)
        if counts == tuple(map(len, self.factors)):
            return narrow
        of_factors = [
            size if n != 1 else 1
            for n, part in zip(narrow.shape, parts, strict=True)
            for size in part
        ]
        return jnp.broadcast_to(narrow.reshape(of_factors), sizes).reshape(self._wide_shape)

    def wide(self, statistic: Array) -> Array:
        """Returns a statistic, wide."""
        factors = self._wide_factors
        grouped = statistic.reshape([size if kept else 1 for size, kept in factors])
        spread = jnp.broadcast_to(grouped, [size for size, _ in factors])
        return spread.reshape(self._wide_shape)

    def mean(self, sums: Array) -> Array:
        """Returns the mean of each group, wide, of wide sums."""
        sizes, kept = zip(*self._wide_factors, strict=True)
        over = tuple(i for i, is_kept in enumerate(kept) if not is_kept)
        total = sums.reshape(sizes).sum(over, keepdims=True) / self.count
        return jnp.broadcast_to(total, sizes).reshape(self._wide_shape)


@dataclasses.dataclass(frozen=True)
class Step:
    """A product, quotient or sum of the normalised array and another.

    Attributes:
        name: "mul", "div" or "add".
        divides: Whether the operand is divided by the deviation, too.
        counts: How many factors of the array each axis of the operand is.
    """

    name: str
    divides: bool
    counts: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class TracedNormalization(Normalization):
    """A norm with the formulas of a program.

    Attributes:
        axes: Axes along which statistics, gain and offset are constant; with the features last.
        epsilon: Constant added to the variance.
        feature: The feature axis in the program.
        groups: In the program.
        of_statistics: From the input to mean and variance.
        of_result: From input, mean, variance and parameters to the result.
        of_steps: From mean, variance and parameters to what the centred array is multiplied by or
            divided by, and what is added.
        steps: What each of these is.
        axis_name: Mesh or `vmap` axis over which statistics are averaged, too.
        axis_index_groups: Groups of indices within that axis.
    """

    axes: tuple[int, ...]
    epsilon: float
    feature: int
    groups: Groups
    of_statistics: Program
    of_result: Program
    of_steps: Program
    steps: tuple[Step, ...]
    axis_name: str | None = None
    axis_index_groups: Any = None

    def statistics(self, x: Array) -> tuple[Array, Array]:
        """Returns the mean and the variance of each group."""
        mean, variance = evaluated(self.of_statistics, [jnp.moveaxis(x, -1, self.feature)])
        return mean, variance

    def result(self, x: Array, mean: Array, variance: Array, *parameters: Array) -> Array:
        """Returns the result, to the bit."""
        x = jnp.moveaxis(x, -1, self.feature)
        (y,) = evaluated(self.of_result, [x, mean, variance, *parameters])
        return jnp.moveaxis(y, self.feature, -1)

    def affine(self, mean: Array, variance: Array, *parameters: Array) -> tuple[Array, Array]:
        """Returns gain and offset in float32, wide, to rounding."""
        deviation = jnp.sqrt(self.groups.wide(variance.astype(jnp.float32)) + self.epsilon)
        gain, offset = jnp.ones_like(deviation), jnp.zeros_like(deviation)
        operands = evaluated(self.of_steps, [mean, variance, *parameters])
        for step, operand in zip(self.steps, operands, strict=True):
            wide = self.groups.operand(operand, step.counts).astype(jnp.float32)
            if step.name == "add":
                offset += wide
            else:
                factor = wide if step.name == "mul" else 1 / wide
                factor = factor * deviation if step.divides else factor
                gain, offset = gain * factor, offset * factor
        return jnp.moveaxis(gain, self.feature, -1), jnp.moveaxis(offset, self.feature, -1)

    def wide(self, statistic: Array) -> Array:
        """Returns a statistic in float32, wide."""
        wide = self.groups.wide(statistic.astype(jnp.float32))
        return jnp.moveaxis(wide, self.feature, -1)

    def means(self, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        """Returns means over each group, of all devices, of wide sums over `axes`; both wide."""

        def mean(wide: Array) -> Array:
            of_groups = self.groups.mean(jnp.moveaxis(wide, -1, self.feature))
            return jnp.moveaxis(of_groups, self.feature, -1)

        return average(tuple(map(mean, sums)), self.axis_name, self.axis_index_groups)

    def shares(self, cotangents: tuple[Array, ...], x: Array) -> tuple[Array, ...]:
        """Returns wide sums, the means of which are those of cotangents of statistics by group."""
        of_device = shares(cotangents, x, self.axis_name)
        return tuple(self.wide(c) / self.groups.wide_count for c in of_device)
