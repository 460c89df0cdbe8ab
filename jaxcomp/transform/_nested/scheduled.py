"""The schedule of a program, and those of the loops and conditionals in it."""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from jaxcomp._core.custom_derivative import reverse_mode_only
from jaxcomp._core.linear_map import ByPosition
from jaxcomp._core.shard_map import filled, vary_like
from jaxcomp.codecs._codec import Seed
from jaxcomp.transform._choice.decisions import PolicyLog
from jaxcomp.transform._choice.graph import PART
from jaxcomp.transform._choice.schedule import Schedule
from jaxcomp.transform._execution import backward, forward
from jaxcomp.transform._program.builder import Builder
from jaxcomp.transform._program.program import Program
from jaxcomp.transform._recognition.unit import Recognized

Make: TypeAlias = "Callable[[Program, Sequence[int], Collection[int], PolicyLog], Scheduled]"
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """A loop or a conditional, whose body or branches store by schedules of their own.

    Attributes:
        programs: The body of the loop, or the branches.
        length: Number of iterations; None of a conditional.
        name: That its stored values have.
    """

    programs: "tuple[Scheduled, ...]"
    length: int | None = None
    name: str = dataclasses.field(default_factory=lambda: f"{PART}{next(_numbers)}")


@dataclasses.dataclass(frozen=True, eq=False)
class Scheduled:
    """The schedule of a program, and of the loops and conditionals in it.

    Attributes:
        schedule: Of the program, in which each part is a function with a backward pass of its own.
        parts: The loops and conditionals that store something.
        units: Stock operations that an operation of `jaxcomp.ops` stands for.
        takes_seed: Whether the schedule's program has the seed as its last argument, for its parts
            and units.
    """

    schedule: Schedule
    parts: tuple[Part, ...]
    units: tuple[Recognized, ...]
    takes_seed: bool

    @property
    def stored_operands(self) -> dict[int, int]:
        """The arguments that are stored as they are, by their number in `schedule.stored`."""
        positions = {v: i for i, v in enumerate(self.schedule.graph.program.arguments)}
        return {
            number: positions[v]
            for number, (v, how) in enumerate(self.schedule.stored.items())
            if v in positions and how.codec is None and not how.offload
        }

    def forward(self, seed: Seed, arguments: Sequence[Any]) -> tuple[list[Any], Any]:
        """As `_forward.forward`; saved values come with the arguments that are read again."""
        if self.takes_seed:
            own = jnp.asarray(0 if seed is None else seed).astype(jnp.uint32)
            arguments = [*arguments, vary_like(own, arguments)]
        made, stored = forward.forward(self.schedule, seed, arguments)
        return made, (stored, {i: arguments[i] for i in backward.used_arguments(self.schedule)})

    def linear(self, residual: Any, tangents: ByPosition) -> ByPosition:
        """The tangents of the results in `schedule.smooth`, from those of the active arguments.

        Raises:
            TypeError: If the schedule encodes a value.
        """
        if self.schedule.encodes:
            reverse_mode_only(self, residual, tangents)
        stored, used = residual
        of_active = [tangents[i] for i in self.schedule.active]
        made = backward.linear(self.schedule, stored, used, of_active)
        return dict(zip(self.schedule.smooth, made, strict=True))

    def backward(self, residual: Any, cotangents: ByPosition) -> ByPosition:
        """The cotangents of the active arguments, from those of the results."""
        arriving = with_zeros(cotangents, self.schedule.smooth, self.schedule.graph.program.results)
        stored, used = residual
        made = backward.backward(self.schedule, stored, used, list(arriving.values()))
        return dict(zip(self.schedule.active, made, strict=True))


def with_zeros(cotangents: ByPosition, smooth: Sequence[int], results: Sequence[Any]) -> ByPosition:
    """The cotangents of the results that have one, with zeros as arrays.

    `jax.vjp` also takes a Python scalar for one.
    """
    return {
        i: jnp.asarray(cotangents[i], results[i].aval.dtype)
        if i in cotangents
        else filled(results[i].aval, 0.0)
        for i in smooth
    }


def scoped(program: Program, equation: JaxprEqn) -> Program:
    """A program that an equation calls, with the equation's name scope around each of its own."""
    builder = Builder()
    arguments = program.arguments
    results = builder.inline(program, arguments, call=equation)
    return builder.program(program, arguments, results)
