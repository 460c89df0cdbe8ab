"""A compiled step as a plan sees it: bytes and seconds of each group, and its moments."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flax import nnx

from jaxcomp._core.module_scopes import add_module_scopes, scope_path
from jaxcomp._core.modules import set_class
from jaxcomp.memory import declared_residuals
from jaxcomp.memory._analyze import analyze_step
from jaxcomp.memory._buffer import Buffer
from jaxcomp.memory._costs import Cost, costs
from jaxcomp.memory._estimate import host_seconds, kernel_seconds
from jaxcomp.memory._hlo import Instruction
from jaxcomp.memory._live_bytes import Timeline
from jaxcomp.memory._origin import Origin, split_op_name
from jaxcomp.memory._report import MemoryReport
from jaxcomp.memory._targets import Target
from jaxcomp.memory._tracing import TracedStep
from jaxcomp.planning._groups import Groups, is_in
from jaxcomp.planning._solver import Moment
from jaxcomp.planning._strategies import Strategy
from jaxcomp.planning._watched import MakeStep, trace_step

_ANY_BANDWIDTH = 10**12


@dataclasses.dataclass(frozen=True)
class Probe:
    """A step, compiled.

    Attributes:
        report: Its memory and its work.
        seconds: Its estimated time.
        declared: Bytes that the program intends to save, by group.
        saved: Bytes that XLA saves for the backward pass, by group.
        seconds_of: The part of the time, by group.
        moments: Points at which much memory is alive; empty where the step is rejected for lack of
            memory.
    """

    report: MemoryReport
    seconds: float
    declared: dict[str, int]
    saved: dict[str, int]
    seconds_of: dict[str, float]
    moments: tuple[Moment, ...]

    def peak(self) -> tuple[str, int, int]:
        """Returns the moment of the most bytes: where it is, saved bytes, and all other bytes."""

        def saved(moment: Moment) -> float:
            return sum(part * self.saved.get(group, 0) for group, part in moment.alive.items())

        highest = max(self.moments, key=lambda moment: moment.rest + saved(moment))
        return highest.where, round(saved(highest)), round(highest.rest)


def trace_scoped(
    make_step: MakeStep, strategy: Strategy, batch: int, target: Target
) -> tuple[TracedStep, list[Any]]:
    """Does what `trace_step` does, with modules of the model in name scopes of their paths."""
    stock: list[tuple[nnx.Module, type[nnx.Module]]] = []

    def apply(model: Any) -> Any:
        applied = strategy(model)
        if isinstance(applied, nnx.Module):
            stock.extend((module, type(module)) for _, module in nnx.iter_modules(applied))
            add_module_scopes(applied, {})
        return applied

    try:
        return trace_step(make_step, strategy, batch, target, apply)
    finally:
        for module, kind in stock:
            set_class(module, kind)


def declared_bytes(traced: TracedStep, groups: Groups) -> dict[str, int]:
    """Returns the bytes that a traced step intends to save, by group."""
    found: Counter[str] = Counter()
    for residual in declared_residuals(traced.traced.jaxpr):
        path = scope_path(residual.scopes)
        found[groups.group_of(path) if path else ""] += residual.nbytes
    return dict(found)


def probe(
    traced: TracedStep, target: Target, capacity: int | None, groups: Groups, *, xla_remat: bool
) -> Probe:
    """Compiles a traced step.

    Args:
        traced: The step, from `trace_scoped`.
        target: What it is compiled for.
        capacity: Bytes that it may use, as in `analyze`.
        groups: The model's groups.
        xla_remat: Whether XLA may recompute values on its own.

    Raises:
        CompileError: If the compilation fails for another reason than lack of memory.
    """
    report, timeline, hlo_text = analyze_step(
        traced, target, capacity, xla_remat, with_timeline=True, with_lines=False
    )
    found = list(_with_groups(hlo_text, groups)) if hlo_text else []
    saved: dict[str, int] = {}
    moments: tuple[Moment, ...] = ()
    start = None if timeline is None else timeline.backward_start
    if timeline is not None and start is not None:
        group_at = {cost.instruction.name: group for cost, group in found}
        saved, moments = _moments(timeline, start, groups, group_at)
    seconds = seconds_of(report, target)
    copying = host_seconds(report.host_traffic_bytes, target)
    return Probe(
        report,
        seconds,
        declared_bytes(traced, groups),
        saved,
        _seconds_of(found, seconds - copying, copying, target),
        moments,
    )


def seconds_of(report: MemoryReport, target: Target) -> float:
    """Returns the estimated time of a step; on a device of unknown rates, one that orders plans."""
    if report.estimated_seconds is not None:
        return report.estimated_seconds
    copying = host_seconds(report.host_traffic_bytes, target)
    return copying + (report.hbm_traffic_bytes or 0) / bandwidth_of(target)


def bandwidth_of(target: Target) -> float:
    """Returns the bytes per second of a target's memory.

    Any number, to order plans, where it is not known.
    """
    return target.bandwidth or _ANY_BANDWIDTH


def _with_groups(hlo_text: str, groups: Groups) -> Iterator[tuple[Cost, str]]:
    """Returns what each instruction of a compiled step costs, and its group."""
    group_of: dict[str, str] = {}
    for cost in costs(hlo_text):
        instruction, where = cost.instruction, cost.computation.name
        group = _group_in((*cost.calls, instruction), groups)
        if not group:  # that of what it reads
            names = (f"{where}/{operand}" for operand in instruction.operands)
            group = next(filter(None, (group_of.get(name, "") for name in names)), "")
        group_of[f"{where}/{instruction.name}"] = group
        yield cost, group


def _seconds_of(
    found: Iterable[tuple[Cost, str]], seconds: float, copying: float, target: Target
) -> dict[str, float]:
    """Divides the time of a step among groups.

    Each has the part of its kernels' traffic and elementwise operations; on a TPU, of their cycles.

    Args:
        found: What each instruction costs, and its group.
        seconds: The step's estimated time, without the copies to and from the host.
        copying: The time of these.
        target: What it is compiled for.
    """
    in_kernels, host, cycles = (defaultdict[str, float](float) for _ in range(3))
    for cost, group in found:
        in_kernels[group] += cost.hbm / bandwidth_of(target)
        in_kernels[group] += kernel_seconds(cost.vector, cost.kernels, target)
        host[group] += cost.host
        cycles[group] += cost.cycles
    shares: dict[str, float] = defaultdict(float)
    for whole, parts in (
        (seconds, cycles if any(cycles.values()) else in_kernels),
        (copying, host),
    ):
        if total := sum(parts.values()):
            for group, part in parts.items():
                shares[group] += whole * part / total
    return dict(shares)


def _group_in(path: Iterable[Instruction], groups: Groups) -> str:
    """Returns the group of an instruction.

    That of its call, or the instruction's own one within that.

    Args:
        path: The calls that it lies in, the outermost first, and the instruction.
        groups: The model's groups.
    """
    found = ""
    for instruction in path:
        scope = split_op_name(instruction.op_name)[0] if "/" in instruction.op_name else ""
        own = groups.group_in(scope) if scope else ""
        if own and (not found or is_in(own, found)):
            found = own
    return found


def _moments(
    timeline: Timeline, start: int, groups: Groups, group_at: Mapping[str, str]
) -> tuple[dict[str, int], tuple[Moment, ...]]:
    """Returns the saved bytes by group, and the highest points.

    There is one for each group that computes and each number of saved buffers alive.

    Args:
        timeline: Of the compiled step.
        start: The point at which its backward pass starts.
        groups: The model's groups.
        group_at: The group of an instruction, by its name.
    """

    def is_saved(buffer: Buffer) -> bool:
        is_read = bool(buffer.reads) and buffer.reads[-1] >= start
        return buffer.start < start <= buffer.end and is_read and buffer.origin.phase != "argument"

    def group_in(origin: Origin) -> str:
        return "" if origin.is_inferred else groups.group_in(origin.scope)

    group_of = {id(b): group_in(b.origin) for b in timeline.buffers if is_saved(b)}
    saved = [buffer for buffer in timeline.buffers if id(buffer) in group_of]
    totals: Counter[str] = Counter()
    begins: dict[int, list[Buffer]] = defaultdict(list)
    ends: dict[int, list[Buffer]] = defaultdict(list)
    for buffer in saved:
        totals[group_of[id(buffer)]] += buffer.bytes
        begins[buffer.start].append(buffer)
        ends[buffer.end + 1].append(buffer)
    alive: Counter[str] = Counter()
    highest: dict[tuple[bool, int, str], tuple[int, int, dict[str, int]]] = {}
    count = 0
    for point, live in enumerate(timeline.live_bytes):
        for buffer in begins[point]:
            alive[group_of[id(buffer)]] += buffer.bytes
        for buffer in ends[point]:
            alive[group_of[id(buffer)]] -= buffer.bytes
        count += len(begins[point]) - len(ends[point])
        rest = live - sum(alive.values())
        key = point >= start, count, group_at.get(timeline.points[point], "")
        if key not in highest or highest[key][0] < rest:
            highest[key] = rest, point, dict(alive)
    moments = [
        Moment(
            f"{'backward' if is_backward else 'forward'} pass{computing and f' of {computing}'}, "
            f"point {point}",
            rest,
            {group: alive / totals[group] for group, alive in counts.items() if alive},
            computing,
        )
        for (is_backward, _, computing), (rest, point, counts) in highest.items()
    ]
    return dict(totals), tuple(moments)
