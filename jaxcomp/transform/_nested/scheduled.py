"""The schedule of a program, and those of the loops and conditionals in it."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence

import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jaxcomp._core.custom_derivative import reverse_mode_only
from jaxcomp._core.linear_map import ByPosition
from jaxcomp._core.shard_map import filled, vary_like
from jaxcomp.codecs._codec import Seed
from jaxcomp.transform._choice.choice import total_bytes
from jaxcomp.transform._choice.context import Context
from jaxcomp.transform._choice.graph import NESTED
from jaxcomp.transform._choice.outliers import Outlier
from jaxcomp.transform._choice.schedule import Schedule
from jaxcomp.transform._execution import backward, forward
from jaxcomp.transform._nested.chunks import as_it_is
from jaxcomp.transform._nested.regions import Region
from jaxcomp.transform._program.builder import Builder
from jaxcomp.transform._program.program import Program, operands_of
from jaxcomp.transform._program.types import Atom, Equation, Variable, is_variable
from jaxcomp.transform._recognition.unit import Recognized

_numbers = itertools.count()


@dataclasses.dataclass(frozen=True, eq=False)
class Nested:
    """The programs inside a loop or a conditional, which store by schedules of their own.

    Attributes:
        programs: The body of the loop, or the branches.
        length: Number of iterations; None of a conditional.
        chunk: How many iterations encode at once.
        name: That its stored values have.
    """

    programs: "tuple[ScheduledProgram, ...]"
    length: int | None = None
    chunk: int = 1
    name: str = dataclasses.field(default_factory=lambda: f"{NESTED}{next(_numbers)}")

    @functools.cached_property
    def iteration(self) -> "ScheduledProgram":
        """The body of a loop as each iteration runs it: without codes, if a chunk encodes."""
        (body,) = self.programs
        if self.chunk == 1:
            return body
        return dataclasses.replace(body, schedule=as_it_is(body.schedule))


@dataclasses.dataclass(frozen=True, eq=False)
class ScheduledProgram:
    """The schedule of a program, and of the loops and conditionals in it.

    Attributes:
        schedule: Of the program, in which each loop and conditional is a function with a backward
            pass of its own.
        nested: The loops and conditionals that store something.
        units: Stock operations that an operation of `jaxcomp.ops` stands for.
        takes_seed: Whether the schedule's program has the seed as its last argument, for its
            loops, conditionals and units.
        regions: The regions under `jax.checkpoint` that the policy decided about.
    """

    schedule: Schedule
    nested: tuple[Nested, ...]
    units: tuple[Recognized, ...]
    takes_seed: bool
    regions: tuple[Region, ...] = ()

    @property
    def waiting_bytes(self) -> int:
        """The bytes that wait for the backward pass."""
        return total_bytes(self.schedule.stored)

    @property
    def regions_inside(self) -> list[Region]:
        """The regions in its loops and conditionals."""
        programs = [program for nested in self.nested for program in nested.programs]
        return [region for p in programs for region in (*p.regions, *p.regions_inside)]

    @property
    def stored_operands(self) -> dict[int, int]:
        """The arguments that are stored as they are, by their number in `schedule.stored`."""
        positions = {v: i for i, v in enumerate(self.schedule.graph.program.arguments)}
        return {
            number: positions[v]
            for number, (v, how) in enumerate(self.schedule.stored.items())
            if v in positions and how.codec is None and not how.offload
        }

    def forward(self, seed: Seed, arguments: Sequence[Array]) -> tuple[list[Array], PyTree]:
        """Runs the forward pass of the schedule.

        Saved values come with the arguments that are read again.
        """
        if self.takes_seed:
            seed_argument = jnp.asarray(0 if seed is None else seed).astype(jnp.uint32)
            arguments = [*arguments, vary_like(seed_argument, arguments)]
        results, stored = forward.forward(self.schedule, seed, arguments)
        return results, (stored, {i: arguments[i] for i in backward.used_arguments(self.schedule)})

    def linear(self, residual: PyTree, tangents: ByPosition) -> ByPosition:
        """Returns the tangents of results in `schedule.smooth`, from those of active arguments.

        Raises:
            TypeError: If the schedule encodes a value.
        """
        if self.schedule.encodes:
            raise reverse_mode_only()
        stored, used = residual
        of_active = [tangents[i] for i in self.schedule.active]
        of_results = backward.linear(self.schedule, stored, used, of_active)
        return dict(zip(self.schedule.smooth, of_results, strict=True))

    def backward(self, residual: PyTree, cotangents: ByPosition) -> ByPosition:
        """Returns the cotangents of the active arguments, from those of the results."""
        arriving = with_zeros(cotangents, self.schedule.smooth, self.schedule.graph.program.results)
        stored, used = residual
        of_arguments = backward.backward(self.schedule, stored, used, list(arriving.values()))
        return dict(zip(self.schedule.active, of_arguments, strict=True))


@dataclasses.dataclass(frozen=True)
class Outer:
    """The program that a loop or a conditional is in.

    Attributes:
        context: The policy.
        schedule: Schedules a program, as `nested.scheduled` does.
        nested: Takes the loops and conditionals that store something.
        outliers: The large constants that values of the program hold.
    """

    context: Context
    schedule: Callable[[Program, Sequence[int], Collection[int], Context], ScheduledProgram]
    nested: list[Nested]
    outliers: Mapping[Variable, Outlier]

    def scheduled(
        self,
        body: Program,
        equation: Equation,
        active: Sequence[int],
        coded: Sequence[int],
        iterations: int = 1,
    ) -> ScheduledProgram:
        """Returns the schedule of a body or branch, in the name scope of its equation."""
        builder = Builder()
        results = builder.inline(body, body.arguments, call=equation)
        program = builder.program(body, body.arguments, results)
        positions = {v: i for i, v in enumerate(body.arguments)}
        outliers = {
            positions[v]: self.outliers[atom]
            for v, atom in operands_of(body, equation).items()
            if is_variable(atom) and atom in self.outliers
        }
        return self.schedule(program, active, coded, self.context.inside(iterations, outliers))

    def noted(self, nested: Nested) -> Nested:
        """Takes note of a loop or a conditional, and returns it."""
        self.nested.append(nested)
        return nested


def with_zeros(
    cotangents: ByPosition, smooth: Sequence[int], results: Sequence[Atom]
) -> ByPosition:
    """Returns the cotangents of the results that have one, with zeros as arrays.

    `jax.vjp` also takes a Python scalar for one.
    """
    return {
        i: jnp.asarray(cotangents[i], results[i].aval.dtype)
        if i in cotangents
        else filled(results[i].aval, 0.0)
        for i in smooth
    }
