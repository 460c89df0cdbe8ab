"""The verdict on compiled strategies: which one to use, and why."""

import dataclasses
from collections.abc import Sequence

from jaxcomp.memory._live_bytes import format_bytes

ERROR = 0.11
"""The largest error of an estimated time over plain's, measured on an H200 (docs/benchmarks)."""
TRAFFIC_ERROR = 0.22
"""The same of HBM traffic over plain's."""
ALIKE = 0.02
"""Two exact strategies, or two with codes, are alike if their estimates differ by so little."""


@dataclasses.dataclass(frozen=True)
class Option:
    """A compiled strategy.

    Attributes:
        name: The strategy's name.
        total_bytes: What XLA needs, arguments included.
        cost: Its estimated time, or its HBM traffic; None if that is not known.
        is_exact: Whether its gradient is exact.
        is_unchanged: Whether nothing is encoded, recomputed or split that the author does not.
    """

    name: str
    total_bytes: int
    cost: float | None
    is_exact: bool
    is_unchanged: bool


@dataclasses.dataclass(frozen=True)
class Room:
    """The memory that a step may use.

    Attributes:
        usable_bytes: What XLA and all else may use; None if it is not known.
        allowance_bytes: What is used beside XLA's bytes: workspaces of libraries, fragmentation.
        target: The target's name.
    """

    usable_bytes: int | None
    allowance_bytes: int
    target: str

    def fits(self, total_bytes: int | None) -> bool | None:
        """Returns whether a step fits that needs so many bytes; None if that is not known."""
        if self.usable_bytes is None or total_bytes is None:
            return None
        return total_bytes + self.allowance_bytes <= self.usable_bytes

    def __str__(self) -> str:
        """Returns the bytes, the allowance and the target."""
        text = f"{format_bytes(self.usable_bytes or 0)} of {self.target}"
        if self.allowance_bytes:
            text += f", with {format_bytes(self.allowance_bytes)} left for all but XLA's buffers"
        return text


def choose(options: Sequence[Option], room: Room, error: float = ERROR) -> Option | None:
    """Returns the option to use; None if none is known to fit, or no cost of what fits is known.

    - A step that fits unchanged is the answer.
    - Otherwise it is the one of the least cost. If that has codes, and an exact one costs no more
      but for the error of estimates, it is the exact one of the least cost.
    - Of what is alike, it is the one with the most headroom.

    Example:
        >>> plain = Option("plain", 90, 1.0, True, True)
        >>> coded = Option("fused:bits=4", 20, 1.02, False, False)
        >>> choose([plain, coded], Room(100, 0, "cpu")).name
        'plain'
        >>> choose([plain, coded], Room(80, 0, "cpu")).name
        'fused:bits=4'
    """
    fitting = [option for option in options if room.fits(option.total_bytes)]
    unchanged = [option for option in fitting if option.is_unchanged]
    if len(unchanged) == 1:
        return unchanged[0]
    known = [(option, option.cost) for option in unchanged or fitting if option.cost is not None]
    if not known:
        return None
    best, least = min(known, key=lambda pair: pair[1])
    exact = [(option, cost) for option, cost in known if option.is_exact]
    if exact and not best.is_exact:
        nearest, cost = min(exact, key=lambda pair: pair[1])
        if cost <= (1 + error) * least:
            best, least = nearest, cost
    alike = [
        option
        for option, cost in known
        if option.is_exact == best.is_exact and cost <= (1 + ALIKE) * least
    ]
    return min(alike, key=lambda option: option.total_bytes)


def explain(
    options: Sequence[Option], room: Room, error: float = ERROR, figure: str = "time"
) -> str:
    """Returns the verdict in words.

    Args:
        options: What was compiled.
        room: What it may use.
        error: The largest error of the ratio of two costs.
        figure: What the costs are, in words.
    """
    if not options:
        return "No row could be compiled."
    if room.usable_bytes is None:
        return f"What fits on {room.target} is not known: give a capacity, such as 11GiB."
    fitting = [option for option in options if room.fits(option.total_bytes)]
    if not fitting:
        least = min(options, key=lambda option: option.total_bytes)
        return (
            f"Nothing fits the {room}; {least.name} needs the least, "
            f"{format_bytes(least.total_bytes)}."
        )
    chosen = choose(options, room, error)
    if chosen is None:
        names = ", ".join(option.name for option in fitting)
        return f"Fit the {room}, with a {figure} that is not known: {names}"
    if chosen.name == "plain":
        return (
            f"Answer: plain. The step fits as it is: it needs {format_bytes(chosen.total_bytes)} "
            f"of the {room}. "
            "Nothing needs to be changed."
        )
    reasons = [_needs(chosen)]
    plain = next((option for option in options if option.name == "plain"), None)
    if plain is not None and not room.fits(plain.total_bytes):
        reasons.append(f"{_needs(plain)}, which does not fit")
    if plain is not None and plain.cost and chosen.cost is not None:
        reasons.append(
            f"{chosen.cost / plain.cost:.2f} of plain's estimated {figure}, which errs by up to "
            f"{error:.0%}"
        )
    least_cost = min((o for o in fitting if o.cost is not None), key=lambda o: o.cost or 0.0)
    if least_cost is not chosen and not least_cost.is_exact and chosen.is_exact:
        reasons.append(f"{least_cost.name} may take less {figure}, but this is exact")
    return f"Answer: {chosen.name}, for the {room}: {'; '.join(reasons)}."


def _needs(option: Option) -> str:
    return f"{option.name} needs {format_bytes(option.total_bytes)}"
