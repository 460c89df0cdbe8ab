"""One strategy that was compiled on the way to a plan."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One strategy that was compiled.

    Attributes:
        name: The strategy's spec, or "plan N".
        total_bytes: What XLA needs, arguments included.
        milliseconds: The estimated step time.
        fits: Whether it fits the budget.
        is_exact: Whether its gradient is exact.
        noise: Standard deviation that codes add to the gradient, as a part of that of SGD; None if
            it was not measured.
        measured_milliseconds: The step time on the attached device; None if it was not run.
    """

    name: str
    total_bytes: int
    milliseconds: float
    fits: bool
    is_exact: bool
    noise: float | None = None
    measured_milliseconds: float | None = None
