"""`max_batch`: finds the largest batch whose training step fits a device."""

from collections.abc import Callable

from jaxcomp.memory._analyze import analyze
from jaxcomp.memory._report import MemoryReport

_FIRST = 8  # The first size, in units of `multiple`.
_STEPS = 4  # After this many sizes with equal memory, the step does not depend on the batch.

MakeStep = Callable[[int], tuple[Callable[..., object], tuple[object, ...]]]


def max_batch(
    make_step: MakeStep,
    target: str | None = None,
    *,
    multiple: int = 1,
    capacity: int | str | None = None,
    xla_remat: bool = False,
) -> int:
    """Finds the largest batch whose step fits a target, by a few compilations.

    The search compiles the step for several batch sizes. It extrapolates linearly from the memory
    of two sizes to the next one. It ends when one batch fits and a slightly larger one does not.
    The two differ by at most 1%, or by `multiple` if that is more.

    Args:
        make_step: a function that takes a batch size and returns the step and a tuple of its
            arguments. Both are passed to `analyze`.
        target: a target's name, as in `analyze`. The default is the attached device.
        multiple: a positive integer that must divide the batch, for example the number of
            devices.
        capacity: what the program may use per device: bytes, or text such as "11GiB". The default
            is the target's own limit, as in `analyze`.
        xla_remat: whether XLA may recompute values on its own to save memory. A larger batch may
            then fit, but its step is slower. Memory is then not linear in the batch, and the
            search may need more compilations.

    Returns:
        The largest batch that fits; 0 if a batch of `multiple` does not fit.

    Raises:
        ValueError: if `multiple` is not positive, if the target's memory is not known and
            `capacity` is not given, if the memory of the step does not depend on the batch, or
            as `analyze`.
        ImportError: if the wheel with the target's compiler is not installed.
        CompileError: if the compilation fails for a reason other than lack of memory.

    Example:
        The step needs 1000 bytes per example for its argument and 1000 bytes for its output.

        >>> import jax, jax.numpy as jnp
        >>> from jaxcomp import memory
        >>> def make_step(batch):
        ...     return jnp.sin, (jax.ShapeDtypeStruct((batch, 250), jnp.float32),)
        >>> memory.max_batch(make_step, "cpu", capacity=1_000_000)
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
    """Extrapolates linearly, from the two sizes nearest the limit, to the size that fills it.

    Returns:
        The size; `None` with fewer than two sizes, without a limit, or if memory does not grow.
    """
    if len(totals) < 2 or usable is None:
        return None
    one, two = sorted(totals, key=lambda units: abs(totals[units] - usable))[:2]
    slope = (totals[two] - totals[one]) / (two - one)
    return int(one + (usable - totals[one]) / slope) if slope > 0 else None
