"""`MemoryReport`: the memory of a program on one target, as a record and as a table."""

import dataclasses
import html
import json
from collections.abc import Callable

from jaxcomp.memory._live_bytes import format_bytes

NOT_GIVEN = "not given by this backend"


@dataclasses.dataclass(frozen=True, repr=False)
class MemoryReport:
    """The memory and the work of one compiled program.

    Byte counts are integers per device, unless the attribute says otherwise. A figure that is not
    known is `None`. `print(report)` prints a table with readable units.

    Attributes:
        target: the name of the target.
        argument_bytes: size of the arguments (parameters, state, batch).
        output_bytes: size of the outputs.
        alias_bytes: size of the outputs that reuse the memory of donated arguments.
        temp_bytes: size of XLA's temporary memory, which holds the saved residuals.
        host_temp_bytes: size of XLA's temporary host memory, which holds offloaded residuals.
        peak_bytes: the largest sum of live buffers. On a TPU it includes the buffers in VMEM.
        total_bytes: device memory that the program needs. It is arguments + outputs - aliased +
            temp, unless XLA reports a total itself.
        constant_bytes: size of the arrays that the function closes over. XLA for GPU may exclude
            them from the other figures. Pass them as arguments to include them.
        declared_residual_bytes: bytes that the program intends to save for its backward pass,
            summed over devices, as `jaxcomp.memory.declared_residual_bytes`. `None` if the
            function is not differentiable.
        capacity_bytes: memory of one device.
        usable_bytes: bytes that the program may use.
        headroom_bytes: usable bytes minus total bytes. It is negative if the program does not fit.
        fits: whether the program fits.
        hbm_traffic_bytes: bytes that one run reads from and writes to device memory. `None` if
            the trip count of a loop depends on data.
        flops: multiplications and additions of one run in matrix products and convolutions,
            summed over devices. `None` if the trip count of a loop depends on data.
        estimated_cycles: XLA's estimate of the cycles of one run. Only a TPU has it.
        estimated_seconds: estimated time of one run in seconds: traffic, FLOPs, vector operations
            and copies to the host, each over the peak rate of the device, and the start of each
            kernel. On a TPU it is the estimated cycles over the clock rate, if that is known.
            `None` for an attached device.
        compile_seconds: wall time of the compilation in seconds.
        xla_flag: the flag without which XLA rejects the program for an absent GPU, because its
            first tile sizes do not fit a matrix product. `None` if it needs none.
        xla_recomputes: whether XLA computes values again on its own, because the program would not
            fit. The program then needs fewer bytes, and more traffic, than it does on a larger
            device; `xla_remat=False` in `analyze` shows it without.
        host_traffic_bytes: bytes that one run copies to and from the host's memory. `None` if the
            trip count of a loop depends on data.
        collective_bytes: bytes of the results of collectives (all-reduce, all-gather and the like)
            in one run, on one device. `None` if the trip count of a loop depends on data.
        vector_operations: elementwise operations and reductions of one run, one per element, on one
            device. `None` if the trip count of a loop depends on data.
        kernels: kernels that one run starts. `None` if the trip count of a loop depends on data.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxcomp import memory
        >>> x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
        >>> report = memory.analyze(lambda x: x + 1, x, target="cpu", capacity=2**20)
        >>> report.total_bytes, report.headroom_bytes, report.fits
        (32768, 1015808, True)
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
    estimated_seconds: float | None
    compile_seconds: float | None
    xla_flag: str | None = None
    xla_recomputes: bool | None = None
    host_traffic_bytes: int | None = None
    collective_bytes: int | None = None
    vector_operations: int | None = None
    kernels: int | None = None

    def to_dict(self) -> dict[str, str | int | float | None]:
        """Converts the report to a dictionary.

        Returns:
            The value of each attribute by its name.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from jaxcomp import memory
            >>> x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
            >>> memory.analyze(jnp.sin, x, target="cpu").to_dict()["argument_bytes"]
            16384
        """
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """Converts the report to JSON.

        Returns:
            A JSON object with the value of each attribute. Unknown figures are `null`.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from jaxcomp import memory
            >>> x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
            >>> memory.analyze(jnp.sin, x, target="cpu").to_json()[:42]
            '{"target": "cpu", "argument_bytes": 16384,'
        """
        return json.dumps(self.to_dict())

    def __repr__(self) -> str:
        """Returns one line."""
        total = known(self.total_bytes, format_bytes)
        fits = {None: "", True: ", fits", False: ", does not fit"}[self.fits]
        return f"MemoryReport(target={self.target!r}: {total} needed{fits})"

    def _repr_html_(self) -> str:
        """Returns what notebooks show."""
        return f"<pre>{html.escape(str(self))}</pre>"

    def __str__(self) -> str:
        """Formats the report as a table of two columns with readable units.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from jaxcomp import memory
            >>> x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
            >>> print(str(memory.analyze(jnp.sin, x, target="cpu")).splitlines()[1])
            arguments           16.0 KiB
        """
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
            ("vector operations", known(self.vector_operations, _number)),
            ("kernels", known(self.kernels, _number)),
            ("estimated cycles", _number(self.estimated_cycles)),
            ("estimated time", format_seconds(self.estimated_seconds)),
            ("compile seconds", _number(self.compile_seconds)),
        ]
        if self.xla_flag is not None:
            rows.append(("compiled with", self.xla_flag))
        if self.xla_recomputes:
            rows.append(("recomputed by XLA", "yes"))
        if self.host_traffic_bytes:
            rows.append(("host traffic", format_bytes(self.host_traffic_bytes)))
        if self.collective_bytes:
            rows.append(("collectives", format_bytes(self.collective_bytes)))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def format_seconds(seconds: float | None) -> str:
    """Formats seconds in milliseconds; `None` gives `NOT_GIVEN`."""
    return NOT_GIVEN if seconds is None else f"{1e3 * seconds:.3g} ms"


def _residual_bytes(count: int | None) -> str:
    return "not differentiable" if count is None else format_bytes(count)


def _bytes(count: int | None) -> str:
    return NOT_GIVEN if count is None else format_bytes(count)


def known(value: int | None, to_text: Callable[[int], str]) -> str:
    """Formats a figure that this package counts; `None` gives "not known"."""
    return "not known" if value is None else to_text(value)


def _number(value: int | float | None) -> str:
    return NOT_GIVEN if value is None else f"{value:,.4g}"
