"""`watch`: the predicted peak of a step beside the one that its device measures."""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

import jax

from jaxcomp.memory._analyze import analyze
from jaxcomp.memory._live_bytes import format_bytes
from jaxcomp.memory._report import MemoryReport, known


class Writer(Protocol):
    """What writes scalars: `SummaryWriter` of tensorboardX or PyTorch."""

    def add_scalar(self, tag: str, value: float, step: int, /) -> object:
        """Writes a value of a step."""


class MeasuredDevice(Protocol):
    """A device, as `jax.local_devices` returns it."""

    @property
    def device_kind(self) -> str:
        """The name of its kind."""

    def memory_stats(self) -> dict[str, int] | None:
        """Returns its statistics; `None` if it has none."""


class Watch:
    """The predicted and the measured peak; `watch` makes it.

    Attributes:
        report: the report of the compiled step.
        peak_before: the highest peak of the devices when the block began, in bytes; `None` if they
            do not measure it.
    """

    def __init__(
        self,
        report: MemoryReport,
        devices: Sequence[MeasuredDevice],
        writer: Writer | None,
        show: Callable[[str], object],
    ) -> None:
        self.report = report
        self._devices, self._writer, self._show = devices, writer, show
        self.peak_before = self.measured_bytes

    @property
    def predicted_bytes(self) -> int | None:
        """Bytes that XLA needs for the step, arguments included."""
        return self.report.total_bytes

    @property
    def measured_bytes(self) -> int | None:
        """The highest peak of the devices since the process started; `None` on a CPU."""
        peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in self._devices]
        return max((peak for peak in peaks if peak is not None), default=None)

    def log(self, step: int) -> None:
        """Writes `memory/predicted_peak_bytes` and `memory/measured_peak_bytes` of a step.

        Raises:
            ValueError: if `watch` was given no writer.
        """
        if self._writer is None:
            raise ValueError("writer=None: expected watch(..., writer=...), to log to")
        for kind, value in (("predicted", self.predicted_bytes), ("measured", self.measured_bytes)):
            if value is not None:
                self._writer.add_scalar(f"memory/{kind}_peak_bytes", value, step)

    def __str__(self) -> str:
        """Returns both peaks in a line."""
        kind = self._devices[0].device_kind
        predicted, measured = self.predicted_bytes, self.measured_bytes
        line = f"peak memory: {known(predicted, format_bytes)} predicted"
        if measured is None:
            return f"{line}; not measured: {kind} has no memory statistics"
        line += f", {format_bytes(measured)} measured on {kind}"
        if measured == self.peak_before:
            return f"{line}, which was reached before the block"
        return line if not predicted else f"{line} ({measured / predicted:.2f} of the prediction)"

    def __enter__(self) -> "Watch":
        """Returns the watch."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Shows both peaks, also after an error, such as one for lack of memory."""
        self._show(str(self))


def watch(
    fn: Callable[..., object],
    *args: object,
    writer: Writer | None = None,
    devices: Sequence[MeasuredDevice] | None = None,
    show: Callable[[str], object] = print,
) -> Watch:
    """Predicts the peak memory of a step, and shows it beside the measured one after a block.

    The step is compiled for the attached device, as `analyze` does. With JAX's compilation cache
    its first call does not compile it again. The measured peak is `peak_bytes_in_use` of
    `Device.memory_stats`. It counts all that the process has had on the device, such as the next
    batch, and JAX cannot reset it. CPUs do not measure it. JAX runs steps asynchronously: wait for
    the last one in the block, as by reading its loss.

    Args:
        fn: the step, as `analyze` takes it.
        *args: its arguments, or their shapes.
        writer: where `Watch.log` writes both peaks: a `SummaryWriter` of tensorboardX
            (`pip install tensorboardX`) or PyTorch.
        devices: what is measured. By default, `jax.local_devices()`.
        show: is called with a line at the end of the block. By default, it is printed.

    Returns:
        A context manager.

    Raises:
        CompileError: if the compilation fails.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxcomp import memory
        >>> step, x = jax.jit(jnp.sin), jnp.ones(1024)
        >>> with memory.watch(step, x, devices=jax.devices("cpu")) as watch:
        ...     for number in range(3):
        ...         x = step(x)
        peak memory: 8.0 KiB predicted; not measured: cpu has no memory statistics
        >>> watch.predicted_bytes, watch.measured_bytes
        (8192, None)
    """
    return Watch(
        analyze(fn, *args), jax.local_devices() if devices is None else devices, writer, show
    )
