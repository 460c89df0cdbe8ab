"""The plan of a checkpointed function: what it stores, why, and in how many bytes."""

import dataclasses
import math
from collections.abc import Iterator

from jaxcomp._core import table
from jaxcomp.policies._policies import dtype_name
from jaxcomp.transform._graph import plain_nbytes
from jaxcomp.transform._loops import Looped
from jaxcomp.transform._origins import module_path, source
from jaxcomp.transform._schedule import Scheme

_HARDLY = 0.9


@dataclasses.dataclass(frozen=True)
class PlannedValue:
    """A value that waits for the backward pass.

    Attributes:
        shape: Its shape.
        dtype: Its dtype's name.
        source: `file:line` where it is made, "" for an argument.
        path: Path of the innermost module that makes it, in a model of `jaxcomp.compress`, or "".
        role: What the backward pass does with it, as `policies.Value` lists roles.
        decision: How it is stored.
        exact_bytes: Bytes that it takes as it is.
        stored_bytes: Bytes that it takes as it is stored, metadata included; 0 in host memory.
        note: What there is to say about it.
    """

    shape: tuple[int, ...]
    dtype: str
    source: str
    path: str
    role: str
    decision: str
    exact_bytes: int
    stored_bytes: int
    note: str

    @property
    def bits_per_element(self) -> float:
        """Stored bits of an element, metadata included."""
        elements = math.prod(self.shape)
        return 8 * self.stored_bytes / elements if elements else 0.0


@dataclasses.dataclass(frozen=True)
class CheckpointPlan:
    """What a checkpointed function stores for its backward pass; prints as a table.

    Attributes:
        values: What it stores. Arguments that the caller holds anyway are not listed.
        plain_bytes: Bytes that JAX would declare to keep without `checkpoint`, arguments not
            counted.
        biased: Whether non-linear steps are computed again from codes.
        idle: Whether the policy has codecs, but none stores anything.
    """

    values: tuple[PlannedValue, ...]
    plain_bytes: int
    biased: bool
    idle: bool

    @classmethod
    def of(cls, looped: Looped, plain_bytes: int) -> "CheckpointPlan":
        """The plan of a function's scheme, and of the schemes of its loops."""
        schemes = list(_schemes(looped))
        asked = any(d.codec is not None for s in schemes for d in s.decisions.values())
        codes = any(stored.is_noisy for s in schemes for stored in s.stored.values())
        values = tuple(_planned(looped))
        idle = bool(values) and asked and not codes
        return cls(values, plain_bytes, looped.scheme.biased, idle)

    @property
    def stored_bytes(self) -> int:
        """Bytes that wait for the backward pass, arguments not counted."""
        return sum(value.stored_bytes for value in self.values)

    def __str__(self) -> str:
        """One line for each value, and the sums."""
        rows = [
            (
                "value",
                "made by",
                "role",
                "decision",
                "exact bytes",
                "stored bytes",
                "bits",
                "note",
            )
        ]
        for value in self.values:
            name = f"{value.dtype}{list(value.shape)}"
            figures = f"{value.exact_bytes:,}", f"{value.stored_bytes:,}"
            bits = f"{value.bits_per_element:.2f}"
            rows.append(
                (
                    name,
                    f"{value.path} {value.source}".strip(),
                    value.role,
                    value.decision,
                    *figures,
                    bits,
                    value.note,
                )
            )
        lines = table.lines(rows, right=range(4, 7))
        lines.append(
            f"{self.stored_bytes:,} bytes are stored where JAX would declare {self.plain_bytes:,}"
        )
        if self.stored_bytes > _HARDLY * self.plain_bytes:
            lines.append("hardly anything is gained: leave the function as it is")
        if self.idle:
            lines.append("the policy's codecs store nothing: it all follows from what is exact")
        if self.biased:
            lines.append("biased: non-linear steps are computed again from codes")
        return "\n".join(lines)


def _schemes(looped: Looped) -> Iterator[Scheme]:
    """A function's scheme, and those of its loops."""
    yield looped.scheme
    for loop in looped.loops:
        yield from _schemes(loop.body)


def _planned(looped: Looped) -> Iterator[PlannedValue]:
    """What a function stores; what its loops have stored as their iterations do."""
    scheme = looped.scheme
    names: set[str] = set()
    for variable, stored in scheme.stored.items():
        found = {loop.name for loop in looped.loops}.intersection(scheme.graph.names_of(variable))
        names |= found
        if found:
            continue
        equation = scheme.graph.made_by.get(variable)
        how = "exact" if stored.codec is None else str(stored.codec)
        decision = "offload" if stored.offload else how
        yield PlannedValue(
            variable.aval.shape,
            dtype_name(variable.aval.dtype),
            source(equation),
            module_path(equation),
            scheme.roles.get(variable, "other") if equation is not None else "input",
            decision if stored.copies == 1 else f"{stored.copies} x {decision}",
            plain_nbytes(variable.aval),
            stored.nbytes(variable.aval),
            stored.note,
        )
    for loop in looped.loops:
        for value in _planned(loop.body) if loop.name in names else ():
            yield dataclasses.replace(
                value,
                shape=(loop.length, *value.shape),
                exact_bytes=loop.length * value.exact_bytes,
                stored_bytes=loop.length * value.stored_bytes,
                note=f"{loop.length} iterations; {value.note}".removesuffix("; "),
            )
