"""The bytes alive at each point of a compiled program, from XLA's own buffer assignment."""

import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ._buffer_assignment import (
    no_compilation_cache,
    one_file,
    read_places,
    read_ranges,
    read_values,
)
from ._compiling import CompiledStep, compile_step
from ._hlo import Instruction, Module, parse
from ._origin import Origin, Origins
from ._passes import backward_start, phase
from ._targets import Target, resolve
from ._tracing import TracedStep, trace

_UNKNOWN = Origin(scope="", operation="made by XLA", phase="other", source="")


@dataclass(frozen=True)
class Buffer:
    """One value in device memory.

    Attributes:
        name: XLA's name of the value.
        bytes: its size.
        shape: dtype and dimensions, e.g. `bf16[128,56,56,256]`.
        origin: the scope, operation, phase and source line that made it.
        start, end: the first and last point of the program at which it is alive.
        reads: the points at which an instruction reads it.
        allocation, offset: where it lies; buffers may share a place, one after the other.
    """

    name: str
    bytes: int
    shape: str
    origin: Origin
    start: int
    end: int
    reads: tuple[int, ...]
    allocation: int
    offset: int

    def label(self) -> str:
        """Scope and operation, or XLA's own name where JAX gave none."""
        parts = [p for p in (self.origin.scope, self.origin.operation) if p]
        return " · ".join(parts) if self.origin is not _UNKNOWN else f"{self.name} (made by XLA)"


@dataclass(frozen=True)
class Timeline:
    """Live bytes over program order.

    A loop's body appears once. Bytes that two buffers share at one point count once.

    Attributes:
        points: the name of the instruction at each point.
        phases: its phase: `argument`, `forward`, `recomputed`, `backward` or `other`.
        encodes: whether it makes a stored code: forward work in a scope with `jaxcomp/`, or a
            forward conversion to integers.
        live_bytes: device bytes alive at each point, arguments and outputs with them.
        buffers: every value in device memory.
        backward_start: the point at which the backward pass starts; None if there is none.
    """

    points: tuple[str, ...]
    phases: tuple[str, ...]
    encodes: tuple[bool, ...]
    live_bytes: tuple[int, ...]
    buffers: tuple[Buffer, ...]
    backward_start: int | None

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once, results from when they are written on.

        `MemoryReport.total_bytes` is more: it has a place for results throughout, and gaps.
        """
        return max(self.live_bytes)

    @property
    def peak_point(self) -> int:
        """The first point at which the most bytes are alive."""
        return self.live_bytes.index(self.peak_bytes)

    def alive(self, point: int) -> list[Buffer]:
        """The buffers alive at a point, largest first; of those that share a place, the newest."""
        places: dict[tuple[int, int], Buffer] = {}
        for buffer in self.buffers:
            if buffer.start <= point <= buffer.end:
                place = (buffer.allocation, buffer.offset)
                if place not in places or places[place].start <= buffer.start:
                    places[place] = buffer
        return sorted(places.values(), key=lambda b: (-b.bytes, b.start, b.name))

    def table(self, rows: int = 15) -> str:
        """The largest buffers at the peak, as text."""
        if rows < 1:
            raise ValueError(f"rows: expected at least 1, got {rows}")
        alive = self.alive(self.peak_point)
        lines = [
            f"peak {format_bytes(self.peak_bytes)} at point {self.peak_point} of "
            f"{len(self.points)}, {len(alive)} buffers alive",
            f"{'size':>10}  {'pass':<10}  {'shape':<26}  made by  (source)",
        ]
        for b in alive[:rows]:
            source = f"  ({b.origin.source})" if b.origin.source else ""
            size, phase_name = format_bytes(b.bytes), b.origin.phase
            lines.append(f"{size:>10}  {phase_name:<10}  {b.shape:<26}  {b.label()}{source}")
        rest = sum(b.bytes for b in alive[rows:])
        if rest:
            lines.append(f"{format_bytes(rest):>10}  in {len(alive) - rows} smaller buffers")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()


def timeline(
    fn: Callable[..., Any],
    *args: Any,
    target: str | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    xla_remat: bool = True,
) -> Timeline:
    """Compiles a function for a device, here or not, and reads which buffers are alive when.

    Args:
        fn: any function of arrays, and all else, as `analyze` takes it.
        *args: its arguments.
        target: what to compile for; the attached device by default.
        donate_argnums: which arguments the program may overwrite.
        static_argnums: which arguments are compile-time constants.
        xla_remat: whether XLA may recompute values on its own where memory is short.

    Returns:
        The timeline of one device's program.

    Raises:
        RuntimeError: if this backend writes no buffer assignment.
        ValueError, ImportError, CompileError: as `analyze`; a TPU's compiler that refuses a
            program for lack of memory too.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jax.ShapeDtypeStruct((1024,), jnp.float32)
        >>> timeline(lambda x: jnp.sum(jnp.sort(x) * x), x, target="cpu").peak_bytes >= 2 * 4096
        True
    """
    where = resolve(target)
    step = trace(
        fn,
        *args,
        donate_argnums=donate_argnums,
        static_argnums=static_argnums,
        target=where,
    )
    return compile_with_timeline(step, where, xla_remat=xla_remat)[1]


def compile_with_timeline(
    step: TracedStep, target: Target, *, xla_remat: bool
) -> tuple[CompiledStep, Timeline]:
    """`compile_step`, with the timeline of the compiled program."""
    with no_compilation_cache(), tempfile.TemporaryDirectory() as directory:
        compiled = compile_step(step, target, xla_remat=xla_remat, dump_dir=directory)
        return compiled, read_timeline(directory, compiled.hlo_text)


def read_timeline(directory: str | Path, hlo_text: str) -> Timeline:
    """Reads a timeline from what a compile with `dump_options(directory)` wrote.

    A compile served from JAX's compilation cache writes nothing: use `no_compilation_cache()`.

    Args:
        directory: where XLA wrote its dump, of one compile only.
        hlo_text: the compiled module, `compiled.as_text()`.

    Raises:
        RuntimeError: if the dump has no buffer assignment.
        ValueError: if `hlo_text` is not a compiled HLO module.
    """
    module = parse(hlo_text)
    origins = Origins(module)
    sequence, ranges = read_ranges(one_file(directory, "live-range"))
    position = {name: k for k, name in enumerate(sequence)}
    positions, uses = read_places(one_file(directory, "buffer-assignment-values"))
    buffers = []
    for name, index, size, place, shape in read_values(
        one_file(directory, "buffer-assignment"), module.tiled
    ):
        if (name, index) not in ranges or size == 0:
            continue  # scratch of a reduction, or an empty workspace
        start, end = ranges[name, index]
        found = (origins.of(*at) for at in [(name, index), *positions[name, index]])
        buffers.append(
            Buffer(
                name=name + index.replace("{}", ""),
                bytes=size,
                shape=shape,
                origin=next((origin for origin in found if origin), _UNKNOWN),
                start=start,
                end=min(end, len(sequence) - 1),
                reads=tuple(sorted({position[u] for u in uses[name, index] if u in position})),
                allocation=place[0],
                offset=place[1],
            )
        )
    work = [_work(module, name) for name in sequence]
    return Timeline(
        points=tuple(sequence),
        phases=tuple(phase(inside[0].op_name) if inside else "other" for inside in work),
        encodes=tuple(any(map(_encodes, inside)) for inside in work),
        live_bytes=tuple(_live_bytes(buffers, len(sequence))),
        buffers=tuple(buffers),
        backward_start=backward_start(module, sequence),
    )


def format_bytes(count: int) -> str:
    """`5767168` as `5.5 MiB`."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"


def _work(module: Module, name: str) -> list[Instruction]:
    """An instruction, and what is fused into it; empty for XLA's own asynchronous steps."""
    instruction = module.instructions.get(name)
    if instruction is None:
        return []
    fused = instruction.called.get("calls", ()) if instruction.opcode == "fusion" else ()
    inner = [i for c in fused for i in module.computations[c].instructions.values()]
    return [instruction, *inner]


def _encodes(instruction: Instruction) -> bool:
    if phase(instruction.op_name) != "forward":
        return False
    to_integer = instruction.opcode == "convert" and instruction.arrays[0].dtype[0] in "us"
    return to_integer or "jaxcomp/" in instruction.op_name


def _live_bytes(buffers: list[Buffer], points: int) -> list[int]:
    """Bytes alive at each point: per allocation, the length of the union of what is alive."""
    by_allocation: dict[int, list[Buffer]] = defaultdict(list)
    for buffer in buffers:
        by_allocation[buffer.allocation].append(buffer)
    live = [0] * points
    for inside in by_allocation.values():
        changes = sorted({0, points, *(b.start for b in inside), *(b.end + 1 for b in inside)})
        inside.sort(key=lambda b: b.offset)
        for first, last in pairwise(changes):
            covered, reached = 0, 0
            for b in inside:
                if b.start <= first <= b.end:
                    covered += max(0, b.offset + b.bytes - max(reached, b.offset))
                    reached = max(reached, b.offset + b.bytes)
            for point in range(first, last):
                live[point] += covered
    return live
