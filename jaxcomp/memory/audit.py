"""Compares the saving that codecs declare with the one that XLA delivers, and says what is kept."""

from dataclasses import dataclass

from .live_bytes import Buffer, Timeline, format_bytes

ENCODED_LATE = "encoded late"
DECODED_EARLY = "decoded early"
NEIGHBOUR = "a neighbour still needs the full tensor"
NOT_COMPRESSED = "its own operator keeps it exact"
RETURNED = "returned by the step"

ADVICE = {
    ENCODED_LATE: "tie the operator's output to its residual in the forward rule: "
    "out, residual = jax.lax.optimization_barrier((out, residual))",
    DECODED_EARLY: "tie the residual to the cotangent in the backward rule: "
    "residual, cotangent = jax.lax.optimization_barrier((residual, cotangent))",
    NEIGHBOUR: "give that neighbour a codec too, or one code for the whole unit (conv, norm, "
    "activation) instead of one per operator",
    NOT_COMPRESSED: "give this operator a codec, or recompute it (jax.checkpoint)",
    RETURNED: "return less from the step, or a reduction of it",
}

# What is free again after this part of the backward pass is working memory of the last layers.
_WORKING = 0.1


@dataclass(frozen=True)
class Kept:
    """A full-size tensor that XLA keeps into the backward pass.

    Attributes:
        buffer: the tensor.
        reason: why XLA probably keeps it, one of the keys of `ADVICE`.
        consumers: what reads it once the backward pass has started.
    """

    buffer: Buffer
    reason: str
    consumers: tuple[str, ...]


@dataclass(frozen=True)
class Audit:
    """Declared against compiled saving, in bytes.

    Attributes:
        declared_saving: declared residuals of plain, less those of compressed.
        compiled_saving: peak of plain, less that of compressed.
        plain_not_kept: declared by plain, but not kept by XLA in the first place (it recomputes
            cheap values and keeps shared ones once); negative if it keeps more.
        compressed_not_declared: kept by XLA beyond what compressed declares.
        other_at_peak: growth of the rest of the peak (arguments, gradients, working memory).
            These three add up to the shortfall.
        kept: what XLA keeps in full, largest first; empty where the savings agree.
        tolerance: the part of the declared saving by which the compiled one may fall short.
    """

    declared_saving: int
    compiled_saving: int
    plain_not_kept: int
    compressed_not_declared: int
    other_at_peak: int
    kept: tuple[Kept, ...]
    tolerance: float

    @property
    def agrees(self) -> bool:
        """Whether the compiled saving is within the tolerance of the declared one, or larger."""
        return _agrees(self.declared_saving, self.compiled_saving, self.tolerance)

    def __str__(self) -> str:
        verdict = "agrees" if self.agrees else "falls short"
        lines = [
            f"declared saving {format_bytes(self.declared_saving)}, "
            f"compiled saving {format_bytes(self.compiled_saving)}: {verdict}"
        ]
        if self.agrees:
            return lines[0]
        lines.append("of the shortfall:")
        lines += [
            f"{format_bytes(count):>12}  {what}"
            for count, what in (
                (self.plain_not_kept, "plain declares and XLA does not keep anyway"),
                (self.compressed_not_declared, "XLA keeps beyond what compressed declares"),
                (self.other_at_peak, "more at the peak that does not wait for the backward pass"),
            )
        ]
        for reason, advice in ADVICE.items():
            kept = [k for k in self.kept if k.reason == reason]
            if kept:
                lines += ["", f"{reason}: {format_bytes(sum(k.buffer.bytes for k in kept))}"]
                lines += [f"  what to do: {advice}"]
                lines += [f"  {_describe(k)}" for k in kept[:8]]
                lines += [f"  and {len(kept) - 8} smaller ones"] if len(kept) > 8 else []
        return "\n".join(lines)


def audit(
    plain: Timeline,
    compressed: Timeline,
    *,
    plain_declared_bytes: int,
    compressed_declared_bytes: int,
    tolerance: float = 0.2,
) -> Audit:
    """Says whether XLA delivers the saving that compressed residuals declare, and if not, why.

    A value counts as a stored code if its scope holds `jaxcomp/`, or if its elements are integers
    or booleans; everything else that was made before the backward pass starts, and lives beyond
    its first tenth, is kept in full. The reason is read off the program: a heuristic, not a proof.

    Args:
        plain: timeline of the step without compression.
        compressed: timeline of the same step with compressed residuals.
        plain_declared_bytes: bytes of the residuals that plain declares.
        compressed_declared_bytes: bytes of the residuals that compressed declares.
        tolerance: how far the compiled saving may fall short, as a part of the declared one.

    Raises:
        ValueError: if a step has no backward pass, if bytes are negative, or if `tolerance` is
            not between 0 and 1.
    """
    for name, count in (
        ("plain_declared_bytes", plain_declared_bytes),
        ("compressed_declared_bytes", compressed_declared_bytes),
    ):
        if count < 0:
            raise ValueError(f"{name}: expected bytes, at least 0, got {count}")
    if not 0 <= tolerance <= 1:
        raise ValueError(f"tolerance: expected a number from 0 to 1, got {tolerance}")
    plain_kept = sum(b.bytes for b in _waiting("plain", plain))
    waiting = _waiting("compressed", compressed)
    compressed_kept = sum(b.bytes for b in waiting)
    declared = plain_declared_bytes - compressed_declared_bytes
    compiled = plain.peak_bytes - compressed.peak_bytes
    full = [] if _agrees(declared, compiled, tolerance) else [b for b in waiting if not _is_code(b)]
    return Audit(
        declared_saving=declared,
        compiled_saving=compiled,
        plain_not_kept=plain_declared_bytes - plain_kept,
        compressed_not_declared=compressed_kept - compressed_declared_bytes,
        other_at_peak=compressed.peak_bytes - compressed_kept - plain.peak_bytes + plain_kept,
        kept=tuple(_explain(buffer, compressed) for buffer in full),
        tolerance=tolerance,
    )


def _agrees(declared: int, compiled: int, tolerance: float) -> bool:
    return compiled >= declared - tolerance * abs(declared)


def _waiting(name: str, timeline: Timeline) -> list[Buffer]:
    """What was computed before the backward pass starts and is alive when it does."""
    start = timeline.backward_start
    if start is None:
        raise ValueError(
            f"{name}: expected the timeline of a training step, found no backward pass"
        )
    return [
        b
        for b in timeline.alive(start)
        if b.start < start
        and b.origin.phase not in ("argument", "other")
        and not b.shape.startswith("(")  # the table of a tuple's pointers
    ]


def _is_code(buffer: Buffer) -> bool:
    """Whether a value is a stored code or mask rather than a full tensor."""
    forward = buffer.origin.phase == "forward"
    integer = buffer.shape.startswith(("u", "s", "pred"))
    return forward and (integer or "jaxcomp/" in buffer.origin.scope)


def _explain(buffer: Buffer, timeline: Timeline) -> Kept:
    start = timeline.backward_start or 0
    reads = [point for point in buffer.reads if point >= start]
    made = [other for other in timeline.buffers if other.start in reads and other is not buffer]
    consumers = tuple(dict.fromkeys(other.label() for other in made))
    if buffer.origin.phase != "forward":
        reason = DECODED_EARLY
    elif any(timeline.encodes[point] for point in reads):
        reason = ENCODED_LATE
    elif any(_operator(other) != _operator(buffer) for other in made):
        reason = NEIGHBOUR
    elif reads:
        reason = NOT_COMPRESSED
    else:
        reason = RETURNED
    return Kept(buffer, reason, consumers)


def _operator(buffer: Buffer) -> str:
    """The operator's scope, without the codec's own."""
    return buffer.origin.scope.partition("jaxcomp/")[0].rstrip("/")


def _describe(kept: Kept) -> str:
    buffer = kept.buffer
    source = f" ({buffer.origin.source})" if buffer.origin.source else ""
    readers = f", read by {', '.join(kept.consumers[:2])}" if kept.consumers else ""
    return f"{format_bytes(buffer.bytes)} {buffer.shape} {buffer.label()}{source}{readers}"
