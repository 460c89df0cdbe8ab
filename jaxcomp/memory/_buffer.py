"""One value in device memory, and groups of values that differ only in the index of their layer."""

import dataclasses
import re
from collections.abc import Iterable

from jaxcomp.memory._origin import Origin

UNKNOWN = Origin(scope="", operation="made by XLA", phase="other", source="")


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One value in device memory.

    Attributes:
        name: XLA's name of the value.
        bytes: its size in bytes.
        shape: its dtype and dimensions, for example `bf16[128,56,56,256]`.
        origin: the scope, operation, phase and source line that computed it.
        start: the first point of the program at which it is alive.
        end: the last point of the program at which it is alive.
        reads: the points at which an instruction reads it.
        allocation: the number of XLA's allocation that holds it.
        offset: its offset in the allocation in bytes. Several buffers may share an offset at
            different times.
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
        """Returns the scope and the operation that computed the value, or XLA's name of it."""
        parts = [p for p in (self.origin.scope, self.origin.operation) if p]
        return " · ".join(parts) if self.origin is not UNKNOWN else f"{self.name} (made by XLA)"

    def group_label(self) -> str:
        """Returns the label with `*` for each number, which equal layers of a model share."""
        return re.sub(r"\d+", "*", self.label())


@dataclasses.dataclass(frozen=True)
class BufferGroup:
    """Buffers of equal size, shape, phase and source line whose labels differ only in numbers.

    Attributes:
        buffers: the buffers.
    """

    buffers: tuple[Buffer, ...]

    @property
    def bytes(self) -> int:
        """The size of all buffers in bytes."""
        return sum(b.bytes for b in self.buffers)

    def label(self) -> str:
        """Returns the label of the buffers, with `*` for the numbers if the labels differ."""
        labels = {b.label() for b in self.buffers}
        return labels.pop() if len(labels) == 1 else self.buffers[0].group_label()


def group(buffers: Iterable[Buffer]) -> list[BufferGroup]:
    """Groups buffers that differ only in the index of their layer, the largest group first."""
    groups: dict[tuple[object, ...], list[Buffer]] = {}
    for b in buffers:
        key = (b.bytes, b.shape, b.origin.phase, b.origin.source, b.group_label())
        groups.setdefault(key, []).append(b)
    return sorted((BufferGroup(tuple(g)) for g in groups.values()), key=lambda g: -g.bytes)
