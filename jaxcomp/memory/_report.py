"""What is known of a program's memory on one target, as a record and as a table."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ._live_bytes import format_bytes

NOT_GIVEN = "not given by this backend"


@dataclass(frozen=True)
class MemoryReport:
    """Memory and work of one compiled program, on each device of the target.

    A figure that the backend does not give is None. Bytes are plain integers.

    Attributes:
        target: the target's name.
        argument_bytes: arguments (parameters, state, batch).
        output_bytes: results.
        alias_bytes: results that take the place of donated arguments.
        temp_bytes: XLA's scratch memory, where residuals live.
        host_temp_bytes: scratch memory in the host, where offloaded residuals live.
        peak_bytes: largest sum of live buffers; on a TPU with those in VMEM.
        total_bytes: what the program needs: arguments + results - aliased + temp.
        constant_bytes: arrays that the function closes over. Of a GPU XLA may leave them out of the
            other figures: give them as arguments.
        declared_residual_bytes: what the program means to keep for its backward pass, summed
            over devices (see `declared_residual_bytes`); None for what has no gradient.
        capacity_bytes: memory of one device.
        usable_bytes: what the program may use of it.
        headroom_bytes: usable bytes that the program leaves; negative if it does not fit.
        fits: whether it fits.
        hbm_traffic_bytes: read from and written to memory by one run.
        flops: multiplications and additions of one run in products and convolutions, summed
            over devices.
        estimated_cycles: XLA's own estimate for a TPU.
        roofline_seconds: an estimate of one run, at best: the longer of what the traffic takes at
            the device's bandwidth and the FLOPs at its bfloat16 rate.
        compile_seconds: wall time of the compilation.
    """

    target: str
    argument_bytes: int | None
    output_bytes: int | None
    alias_bytes: int | None
    temp_bytes: int | None
    host_temp_bytes: int | None
    peak_bytes: int | None
    total_bytes: int | None
    constant_bytes: int
    declared_residual_bytes: int | None
    capacity_bytes: int | None
    usable_bytes: int | None
    headroom_bytes: int | None
    fits: bool | None
    hbm_traffic_bytes: int | None
    flops: int | None
    estimated_cycles: int | None
    roofline_seconds: float | None
    compile_seconds: float | None

    def to_dict(self) -> dict[str, Any]:
        """All figures by name."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        """A table of two columns with human units."""
        rows = [
            ("target", self.target),
            ("arguments", _bytes(self.argument_bytes)),
            ("outputs", _bytes(self.output_bytes)),
            ("aliased", _bytes(self.alias_bytes)),
            ("temp", _bytes(self.temp_bytes)),
            ("host temp", _bytes(self.host_temp_bytes)),
            ("peak", _bytes(self.peak_bytes)),
            ("total needed", _bytes(self.total_bytes)),
            ("constants", _bytes(self.constant_bytes)),
            ("declared residuals", _residual_bytes(self.declared_residual_bytes)),
            ("device memory", _bytes(self.capacity_bytes)),
            ("usable", _bytes(self.usable_bytes)),
            ("headroom", _bytes(self.headroom_bytes)),
            ("fits", NOT_GIVEN if self.fits is None else "yes" if self.fits else "no"),
            ("HBM traffic", known(self.hbm_traffic_bytes, format_bytes)),
            ("FLOPs", known(self.flops, _number)),
            ("estimated cycles", _number(self.estimated_cycles)),
            ("roofline estimate", format_seconds(self.roofline_seconds)),
            ("compile seconds", _number(self.compile_seconds)),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def format_seconds(seconds: float | None) -> str:
    """Milliseconds, or that there is no figure."""
    return NOT_GIVEN if seconds is None else f"{1e3 * seconds:.3g} ms"


def _residual_bytes(count: int | None) -> str:
    return "it has no gradient" if count is None else format_bytes(count)


def _bytes(count: int | None) -> str:
    return NOT_GIVEN if count is None else format_bytes(count)


def known(value: int | None, to_text: Callable[[int], str]) -> str:
    """What this library counts itself; a loop whose turns depend on data leaves it unknown."""
    return "not known" if value is None else to_text(value)


def _number(value: int | float | None) -> str:
    return NOT_GIVEN if value is None else f"{value:,.4g}"
