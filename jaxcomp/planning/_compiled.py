"""One strategy that was compiled on the way to a plan."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Compiled:
    """One strategy that was compiled.

    Attributes:
        name: The strategy's spec, or "plan N".
        total_bytes: What XLA needs, arguments included.
        milliseconds: The estimated step time.
        fits: Whether it fits the budget.
        is_exact: Whether its gradient is exact.
    """

    name: str
    total_bytes: int
    milliseconds: float
    fits: bool
    is_exact: bool
