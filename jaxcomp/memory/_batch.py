"""`max_batch`: the largest batch whose training step fits a device."""

from collections.abc import Callable
from typing import Any

from ._analyze import analyze
from ._report import MemoryReport

_FIRST = 8  # the first size tried, in multiples
_STEPS = 4  # as many sizes of equal memory show that it does not depend on the batch

MakeStep = Callable[[int], tuple[Callable[..., Any], tuple[Any, ...]]]


def max_batch(
    make_step: MakeStep,
    target: str | None = None,
    *,
    multiple: int = 1,
    capacity: int | None = None,
    xla_remat: bool = False,
) -> int:
    """Finds the largest batch whose step fits, by a few compilations.

    A line through two sizes tells the next one. The search ends when a batch fits and one larger
    by 1% (or by `multiple`, if that is more) does not, both compiled.

    Args:
        make_step: from a batch size to a function and its arguments, as `analyze` takes them.
        target: as in `analyze`.
        multiple: the batch must be a multiple of it, for example of the number of devices.
        capacity: bytes that the program may use, as in `analyze`.
        xla_remat: whether XLA may recompute values on its own where memory is short. With it a
            larger batch may fit, but pays for it in time, and memory is no line.

    Returns:
        The batch; 0 if not even `multiple` fits.

    Raises:
        ValueError: if `multiple` is not positive, it is not known what the target can hold, or the
            step does not depend on the batch.
        CompileError: if the compiler fails for another reason than memory.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def make_step(batch):
        ...     return jnp.sin, (jax.ShapeDtypeStruct((batch, 250), jnp.float32),)
        >>> max_batch(make_step, "cpu", capacity=1_000_000)  # the array and its sine
        500
    """
    if multiple < 1:
        raise ValueError(f"multiple={multiple}: expected a positive number")

    def compile_units(units: int) -> MemoryReport:
        step, arguments = make_step(units * multiple)
        report = analyze(step, *arguments, target=target, capacity=capacity, xla_remat=xla_remat)
        if report.fits is None:
            raise ValueError(f"target={report.target!r}: its memory is not known; give a capacity")
        return report

    totals: dict[int, int] = {}
    largest, smallest, units = 0, None, _FIRST
    while True:
        report = compile_units(units)
        if report.total_bytes is not None:
            totals[units] = report.total_bytes
        if len(totals) >= _STEPS and len(set(totals.values())) == 1:
            raise ValueError(
                f"make_step: batches of {[n * multiple for n in totals]} need the same memory; "
                "expected a step for the batch that it is called with"
            )
        if report.fits:
            largest = units
        else:
            smallest = units
        gap = max(1, largest // 100)
        if smallest is not None and smallest - largest <= gap:
            return largest * multiple
        middle = 2 * largest if smallest is None else (largest + smallest) // 2
        units = max(_on_the_line(totals, report.usable_bytes) or middle, largest + gap)
        if smallest is not None and units >= smallest:
            units = middle


def _on_the_line(totals: dict[int, int], usable: int | None) -> int | None:
    """Where the line through the two sizes nearest the limit meets it; None without a line."""
    if len(totals) < 2 or usable is None:
        return None
    one, two = sorted(totals, key=lambda units: abs(totals[units] - usable))[:2]
    slope = (totals[two] - totals[one]) / (two - one)
    return int(one + (usable - totals[one]) / slope) if slope > 0 else None
