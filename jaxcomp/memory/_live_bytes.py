"""The live bytes at each point of a compiled program, from XLA's buffer assignment."""

import dataclasses
import html
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

from jaxcomp.memory._buffer import UNKNOWN, Buffer, group
from jaxcomp.memory._buffer_assignment import (
    one_file,
    read_places,
    read_ranges,
    read_values,
)
from jaxcomp.memory._compiling import CompiledStep, compile_step
from jaxcomp.memory._estimate import seconds_by_instruction
from jaxcomp.memory._hlo import Instruction, Module, parse
from jaxcomp.memory._origin import Origins
from jaxcomp.memory._passes import backward_start, phase
from jaxcomp.memory._targets import Target, resolve
from jaxcomp.memory._tracing import TracedStep, trace


@dataclasses.dataclass(frozen=True, repr=False)
class Timeline:
    """The live bytes of one device at each point of a program.

    A point is the position of an instruction in program order. The body of a loop appears once.
    Bytes that two buffers share at one point count once.

    Attributes:
        points: the name of the instruction at each point.
        phases: the phase of each instruction: `forward`, `recomputed`, `backward` or `other`.
        encodes: whether each instruction encodes a residual. Such an instruction belongs to the
            forward pass, and either converts to integers or has a scope with `jaxcomp/`.
        live_bytes: the bytes alive at each point in device memory, including arguments and
            outputs.
        buffers: all values in device memory. A buffer has the attributes `name`, `bytes`,
            `shape`, `origin`, `start`, `end`, `reads`, `allocation` and `offset`.
        backward_start: the point at which the backward pass starts; `None` if there is none.
        seconds: the estimated seconds of each instruction, in a loop of all iterations; `None`
            where the rates of the target are not known, as on a CPU.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxcomp import memory
        >>> x = jax.ShapeDtypeStruct((1024,), jnp.float32)
        >>> live = memory.timeline(jnp.sin, x, target="cpu")
        >>> live.live_bytes, live.phases  # the argument, then the argument and the output
        ((4096, 8192), ('other', 'other'))
    """

    points: tuple[str, ...]
    phases: tuple[str, ...]
    encodes: tuple[bool, ...]
    live_bytes: tuple[int, ...]
    buffers: tuple[Buffer, ...]
    backward_start: int | None
    seconds: tuple[float, ...] | None

    @property
    def peak_bytes(self) -> int:
        """The largest number of bytes that are alive at one point.

        An output counts from the point at which it is written. `MemoryReport.total_bytes` is
        larger: it includes the outputs throughout the program, and gaps between buffers.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from jaxcomp import memory
            >>> x = jax.ShapeDtypeStruct((1024,), jnp.float32)
            >>> memory.timeline(jnp.sin, x, target="cpu").peak_bytes
            8192
        """
        return max(self.live_bytes)

    @property
    def peak_point(self) -> int:
        """The first point at which `peak_bytes` are alive.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from jaxcomp import memory
            >>> x = jax.ShapeDtypeStruct((1024,), jnp.float32)
            >>> memory.timeline(jnp.sin, x, target="cpu").peak_point
            1
        """
        return self.live_bytes.index(self.peak_bytes)

    def alive(self, point: int) -> list[Buffer]:
        """Lists the buffers that are alive at a point.

        If several buffers share an allocation and an offset, the list has only the newest one.

        Args:
            point: a position in `points`.

        Returns:
            The buffers, the largest first.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from jaxcomp import memory
            >>> x = jax.ShapeDtypeStruct((1024,), jnp.float32)
            >>> live = memory.timeline(jnp.sin, x, target="cpu")
            >>> [(buffer.shape, buffer.bytes) for buffer in live.alive(0)]
            [('f32[1024]', 4096)]
        """
        places: dict[tuple[int, int], Buffer] = {}
        for buffer in self.buffers:
            if buffer.start <= point <= buffer.end:
                place = (buffer.allocation, buffer.offset)
                if place not in places or places[place].start <= buffer.start:
                    places[place] = buffer
        return sorted(places.values(), key=lambda b: (-b.bytes, b.start, b.name))

    def table(self, rows: int = 15) -> str:
        """Formats the largest buffers that are alive at the peak as a table.

        Buffers of equal size, shape, pass and source line, whose labels differ only in numbers,
        share a row. The label of such a row has `*` for the numbers.

        Args:
            rows: the number of rows, at least 1.

        Returns:
            The table: a line for the peak, a header, one line per group of buffers, and one line
            for the sum of the buffers that are not listed.

        Raises:
            ValueError: if `rows` is less than 1.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from jaxcomp import memory
            >>> x = jax.ShapeDtypeStruct((1024,), jnp.float32)
            >>> print(memory.timeline(jnp.sin, x, target="cpu").table(rows=1))
            peak 8.0 KiB at point 1 of 2, 2 buffers alive
                        size  pass        shape                       made by  (source)
                     4.0 KiB  argument    f32[1024]                   x · argument
                     4.0 KiB  in 1 other buffers
        """
        if rows < 1:
            raise ValueError(f"rows: expected at least 1, got {rows}")
        alive = self.alive(self.peak_point)
        groups = group(alive)
        lines = [
            f"peak {format_bytes(self.peak_bytes)} at point {self.peak_point} of "
            f"{len(self.points)}, {len(alive)} buffers alive",
            f"{'size':>16}  {'pass':<10}  {'shape':<26}  made by  (source)",
        ]
        for g in groups[:rows]:
            one, count = g.buffers[0], len(g.buffers)
            size = format_bytes(one.bytes) if count == 1 else f"{count} x {format_bytes(one.bytes)}"
            source = f"  ({short_source(one.origin.source)})" if one.origin.source else ""
            lines.append(
                f"{size:>16}  {one.origin.phase:<10}  {one.shape:<26}  {g.label()}{source}"
            )
        rest = sum(g.bytes for g in groups[rows:])
        if rest:
            others = sum(len(g.buffers) for g in groups[rows:])
            lines.append(f"{format_bytes(rest):>16}  in {others} other buffers")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        """Returns one line."""
        return (
            f"Timeline({len(self.points)} points, {len(self.buffers)} buffers: peak "
            f"{format_bytes(self.peak_bytes)} at point {self.peak_point})"
        )

    def _repr_html_(self) -> str:
        """Returns what notebooks show: the live bytes as a line, and the table."""
        width, height, peak = 640, 120, self.peak_bytes or 1
        across = max(1, len(self.points) - 1)
        line = " ".join(
            f"{width * i / across:.1f},{height * (1 - live / peak):.1f}"
            for i, live in enumerate(self.live_bytes)
        )
        return (
            f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
            f'<polyline fill="none" stroke="#4477aa" points="{line}"/></svg>'
            f"<pre>{html.escape(str(self))}</pre>"
        )


def timeline(
    fn: Callable[..., object],
    *args: object,
    target: str | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    xla_remat: bool = True,
) -> Timeline:
    """Compiles a function for a target and reads which buffers are alive at each point.

    The function is not run. The target need not be attached. XLA dumps its buffer assignment to
    a temporary folder, and JAX's compilation cache is off during the compilation.

    Args:
        fn: a function of arrays, plain or jitted, as in `analyze`.
        *args: the arguments of `fn`, as in `analyze`: arrays, `jax.ShapeDtypeStruct`s, Flax NNX
            objects, or pytrees of them, of any shape and dtype.
        target: a target's name, such as `h100`. The default is the attached device.
        donate_argnums: positions of the arguments that the program may overwrite, as in
            `jax.jit`.
        static_argnums: positions of the arguments that are compile-time constants, as in
            `jax.jit`.
        xla_remat: whether XLA may recompute values on its own to save memory.

    Returns:
        The timeline of the program of one device, in bytes.

    Raises:
        RuntimeError: if the backend does not dump its buffer assignment.
        ValueError: if `target` is unknown, if the mesh of the arguments does not match the
            target, or if `fn` is already jitted and `donate_argnums` or `static_argnums` is
            given.
        ImportError: if the wheel with the target's compiler is not installed.
        CompileError: if the compilation fails, also for lack of memory on a TPU.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxcomp import memory
        >>> def step(x):
        ...     return jax.grad(lambda x: jnp.sum(jnp.sin(x) ** 2))(x)
        >>> x = jax.ShapeDtypeStruct((1024,), jnp.float32)
        >>> live = memory.timeline(step, x, target="cpu")
        >>> live.peak_bytes >= 2 * 4096, "backward" in live.phases
        (True, True)
    """
    where = resolve(target)
    step = trace(
        fn,
        *args,
        donate_argnums=donate_argnums,
        static_argnums=static_argnums,
        target=where,
    )
    return compile_with_timeline(step, where, xla_remat=xla_remat, with_lines=True)[1]


def compile_with_timeline(
    step: TracedStep, target: Target, *, xla_remat: bool, with_lines: bool
) -> tuple[CompiledStep, Timeline]:
    """Compiles a traced function, as `compile_step`, and reads the timeline of the program."""
    with tempfile.TemporaryDirectory() as directory:
        compiled = compile_step(
            step, target, xla_remat=xla_remat, dump_dir=directory, with_lines=with_lines
        )
        return compiled, read_timeline(directory, compiled.hlo_text, target, step.argument_names)


def read_timeline(
    directory: str | Path,
    hlo_text: str,
    target: Target,
    argument_names: Mapping[str, str] = MappingProxyType({}),
) -> Timeline:
    """Reads a timeline from the dump of a compilation with `dump_options`.

    A compilation that JAX serves from its cache writes no dump. Use `no_compilation_cache()`.

    Args:
        directory: the folder of the dump of a single compilation.
        hlo_text: the text of the compiled module, `compiled.as_text()`.
        target: the target of the compilation.
        argument_names: readable names of arguments, by their names in the module.

    Returns:
        The timeline.

    Raises:
        RuntimeError: if the dump has no buffer assignment.
        ValueError: if `hlo_text` is not a compiled HLO module.
    """
    module = parse(hlo_text)
    origins = Origins(module, argument_names)
    sequence, ranges = read_ranges(one_file(directory, "live-range"))
    position = {name: k for k, name in enumerate(sequence)}
    positions, uses = read_places(one_file(directory, "buffer-assignment-values"))
    buffers = []
    for name, index, size, place, shape in read_values(
        one_file(directory, "buffer-assignment"), module.tiled
    ):
        if (name, index) not in ranges or size == 0:
            continue  # It is scratch memory of a reduction, or an empty workspace.
        start, end = ranges[name, index]
        found = (origins.of(*at) for at in [(name, index), *positions[name, index]])
        buffers.append(
            Buffer(
                name=name + index.replace("{}", ""),
                bytes=size,
                shape=shape,
                origin=next((origin for origin in found if origin), UNKNOWN),
                start=start,
                end=min(end, len(sequence) - 1),
                reads=tuple(sorted({position[u] for u in uses[name, index] if u in position})),
                allocation=place[0],
                offset=place[1],
            )
        )
    work = [_work(module, name) for name in sequence]
    seconds = seconds_by_instruction(hlo_text, target)
    return Timeline(
        points=tuple(sequence),
        phases=tuple(phase(inside[0].op_name) if inside else "other" for inside in work),
        encodes=tuple(any(map(_encodes, inside)) for inside in work),
        live_bytes=tuple(_live_bytes(buffers, len(sequence))),
        buffers=tuple(buffers),
        backward_start=backward_start(module, sequence),
        seconds=None if seconds is None else tuple(seconds.get(name, 0.0) for name in sequence),
    )


def short_source(source: str) -> str:
    """Returns `file:line` relative to the current folder, or without the folder of packages.

    Example:
        >>> short_source("/usr/lib/python3/site-packages/flax/nnx/module.py:7")
        'flax/nnx/module.py:7'
    """
    here = f"{os.getcwd()}{os.sep}"
    return source.removeprefix(here).rpartition(f"site-packages{os.sep}")[2]


def format_bytes(count: int) -> str:
    """Formats a number of bytes with a binary unit.

    Example:
        >>> format_bytes(5767168)
        '5.5 MiB'
    """
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"


def _work(module: Module, name: str) -> list[Instruction]:
    """Returns an instruction and those fused into it.

    It is empty for a name that is not in the HLO text.
    """
    instruction = module.instructions.get(name)
    if instruction is None:
        return []
    fused = instruction.called.get("calls", ()) if instruction.opcode == "fusion" else ()
    inner = [i for c in fused for i in module.computations[c].instructions.values()]
    return [instruction, *inner]


def _encodes(instruction: Instruction) -> bool:
    """Returns whether a forward instruction encodes a residual, by its scope or its dtype."""
    if phase(instruction.op_name) != "forward":
        return False
    to_integer = instruction.opcode == "convert" and instruction.arrays[0].dtype[0] in "us"
    return to_integer or "jaxcomp/" in instruction.op_name


def _live_bytes(buffers: list[Buffer], points: int) -> list[int]:
    """Returns the bytes alive at each point.

    The union of the live buffers of each allocation, summed.
    """
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
