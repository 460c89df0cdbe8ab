"""`Plan`: what a function or model saves for its backward pass, why, and in how many bytes."""

import collections
import dataclasses
import html
import math
import re
import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax

from jaxcomp._core import table
from jaxcomp.codecs import Codec
from jaxcomp.codecs._offload import inner_codec
from jaxcomp.memory._live_bytes import format_bytes
from jaxcomp.memory._source_line import source_call, source_line
from jaxcomp.policies._value import dtype_name
from jaxcomp.transform._choice.bias import percent
from jaxcomp.transform._choice.graph import plain_nbytes
from jaxcomp.transform._choice.schedule import Schedule
from jaxcomp.transform._nested.regions import Region
from jaxcomp.transform._nested.scheduled import Nested, ScheduledProgram
from jaxcomp.transform._program.origins import module_path
from jaxcomp.transform._program.primitives import rounds_coarsely
from jaxcomp.transform._program.types import Variable, is_variable
from jaxcomp.transform._recognition.bias import bias_of_norm, positions
from jaxcomp.transform._recognition.unit import NormAct, NormCurve, Recognized

_HARDLY = 0.9
_NOTED = 1e-3  # a norm's bias, as a part of the gradient
_RIGHT = (3, 6, 7, 8)  # columns of numbers
_DEFAULTS = re.compile(
    r", (group='channel'|rounding='stochastic'|signed=\w+|scale_source='norm'|kernels=False)"
    r"(?=[,)])"
)
_WORTH_A_WARNING = 2**20  # bytes
_WHY_EXACT = ("kept exactly", "no codec encodes", "fewer than")


@dataclasses.dataclass(frozen=True)
class SavedValue:
    """What is saved for the backward pass: one value, or all that a layer of `jaxcomp.nn` saves.

    Attributes:
        path: Path of the innermost module that computes it, or "".
        source: `file:line` of the code that computes it, or "".
        op: Kind of operation of a layer of `jaxcomp.nn` or of a recognized stock operation, such as
            "norm_act"; "" for a value.
        shape: Its shape; of a layer or operation the number of its elements, over all calls.
        dtype: Name of its dtype; "" for a layer or operation.
        role: What the backward pass does with a value, as `policies.Value` lists roles; "" for a
            layer.
        decision: What encodes it, or "exact" or "offload"; "code" for what a layer of
            `jaxcomp.nn` or an inner `checkpoint` has encoded.
        exact_bytes: Bytes without compression.
        saved_bytes: Bytes in the device's memory, metadata included; 0 for an offloaded value.
        note: A remark, such as why a value is exact.
    """

    path: str
    source: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    role: str
    decision: str
    exact_bytes: int
    saved_bytes: int
    note: str = ""

    @property
    def elements(self) -> int:
        """Number of elements that are saved or encoded."""
        return math.prod(self.shape)

    @property
    def bits_per_element(self) -> float:
        """Saved bits per element, metadata included; 0 where there are no elements."""
        return 8 * self.saved_bytes / self.elements if self.elements else 0.0


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """What a function or model saves for its backward pass; prints as a table.

    Attributes:
        values: What it saves. Arguments and parameters, which the caller holds, are not listed.
        exact_bytes: Bytes that JAX would declare to keep without compression.
        notes: Remarks on the whole.
    """

    values: tuple[SavedValue, ...]
    exact_bytes: int
    notes: tuple[str, ...] = ()

    @classmethod
    def of_program(cls, whole: ScheduledProgram, exact_bytes: int) -> "Plan":
        """Returns the plan of a traced function: of its schedule, and of those inside of it."""
        schedules = [part.schedule for part in _all(whole)]
        of_units = [unit.codec for part in _all(whole) for unit in part.units]
        asked = any(d.codec is not None for s in schedules for d in s.decisions.values())
        codes = any(stored.is_noisy for s in schedules for stored in s.stored.values())
        codes = codes or any(codec is not None for codec in of_units)
        regions = [region for part in _all(whole) for region in part.regions]
        codes = codes or any(region.encodes_again for region in regions)
        values = tuple(_planned(whole))
        notes = []
        saved_bytes = sum(value.saved_bytes for value in values)
        if saved_bytes > _HARDLY * exact_bytes and not any(r.is_open for r in regions):
            notes.append("hardly anything is saved: leave the function as it is")
        if values and asked and not codes:
            is_told = any(why in value.note for value in values for why in _WHY_EXACT)
            where_told = "the notes of the values say why"
            why = where_told if is_told else "arguments and exact values give all others"
            notes.append(f"codecs encode nothing: {why}")
        if asked and any(_has_shard_map(s) for s in schedules):
            notes.append("what jax.shard_map reads is exact: call jc.checkpoint inside of it")
        codecs = [*(s.codec for part in schedules for s in part.stored.values()), *of_units]
        biased = {str(codec) for codec in codecs if _is_biased(codec)}
        notes += [f"biased: {codec} is a biased codec" for codec in sorted(biased)]
        notes += _notes_of_regions(regions)
        if whole.schedule.biased and codes:
            notes.append("biased: nonlinear steps are recomputed from decoded values")
        if codes and any(rounds_coarsely(e) for s in schedules for e in s.linear.equations):
            notes.append("biased by up to a step of a cast: casts round cotangents and their noise")
        if codes:
            lines = dict.fromkeys(source_line(e) for s in schedules for e in s.nonlinear_rules)
            notes += [
                f"biased{where and ' at '}{where}: the backward rule of a jax.custom_vjp is not "
                "linear in its cotangent, which has noise"
                for where in lines
            ]
        return cls(values, exact_bytes, tuple(notes))

    @property
    def saved_bytes(self) -> int:
        """Bytes in the device's memory that are saved, arguments and parameters not counted."""
        return sum(value.saved_bytes for value in self.values)

    @property
    def bits_per_element(self) -> float:
        """Mean bits of an encoded element, metadata included; 0 if nothing is encoded."""
        coded = [v for v in self.values if v.decision not in ("exact", "offload", "code", "")]
        coded = [v for v in coded if v.saved_bytes and not v.decision.startswith("Packed")]
        elements = sum(v.elements for v in coded)
        return 8 * sum(v.saved_bytes for v in coded) / elements if elements else 0.0

    def __str__(self) -> str:
        """Returns a table, the most bytes first, and the totals.

        Values of repeated blocks are one row.
        """
        groups: dict[SavedValue, list[SavedValue]] = {}
        for value in self.values:
            of_any_block = dataclasses.replace(value, path=without_indices(value.path))
            groups.setdefault(of_any_block, []).append(value)
        largest = sorted(groups.values(), key=lambda g: (-_sum(g, "saved_bytes"), g[0].path))
        header = ("module", "source", "value", "", "role", "decision", "bytes", "saved", "bits")
        rows = [(*header, "note"), *map(_row, largest)]
        total = f"{self.saved_bytes:,} bytes are saved, {self.exact_bytes:,} without compression"
        return "\n".join([*_without_empty_columns(rows), total, *self.notes])

    def __repr__(self) -> str:
        """Returns one line."""
        return (
            f"Plan({len(self.values)} values: {format_bytes(self.saved_bytes)} saved, "
            f"{format_bytes(self.exact_bytes)} without compression)"
        )

    def _repr_html_(self) -> str:
        """Returns what notebooks show."""
        return f"<pre>{html.escape(str(self))}</pre>"


def without_indices(path: str) -> str:
    """Returns the path that modules of repeated blocks share.

    Example:
        >>> without_indices("blocks/3/norm"), without_indices("Decoder/layers_3/norm")
        ('blocks/*/norm', 'Decoder/layers_*/norm')
    """
    keys = path.split("/")
    if any(map(str.isdigit, keys)):
        return "/".join("*" if key.isdigit() else key for key in keys)
    return re.sub(r"_\d+(?=/|$)", "_*", path)


def _without_empty_columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Returns the lines of a table, without columns that are empty but for their name."""
    shown = [i for i, (_, *cells) in enumerate(zip(*rows, strict=True)) if any(cells)]
    right = [n for n, i in enumerate(shown) if i in _RIGHT]
    return table.lines([tuple(row[i] for i in shown) for row in rows], right=right)


def _sum(values: list[SavedValue], attribute: str) -> int:
    return sum(getattr(value, attribute) for value in values)


def _row(group: list[SavedValue]) -> tuple[str, ...]:
    """Returns the cells of a row for equal values."""
    value, count = group[0], len(group)
    paths = {one.path for one in group}
    return (
        value.path if len(paths) == 1 else without_indices(value.path),
        *(value.source, value.op or f"{value.dtype}{list(value.shape)}"),
        *(f"x {count}" if count > 1 else "", value.role),
        _DEFAULTS.sub("", value.decision),
        *(format_bytes(_sum(group, name)) for name in ("exact_bytes", "saved_bytes")),
        f"{value.bits_per_element:.2f}" if value.elements else "",
        value.note,
    )


def _is_biased(codec: Codec | None) -> bool:
    return codec is not None and not codec.unbiased


def _has_shard_map(schedule: Schedule) -> bool:
    """Returns whether the backward pass has a `jax.shard_map`, whose values have no codes."""
    return any(e.primitive.name == "shard_map" for e in schedule.backward.equations)


def _all(whole: ScheduledProgram) -> Iterator[ScheduledProgram]:
    """Returns a function, the iterations of its loops and its branches."""
    yield whole
    for nested in whole.nested:
        for program in nested.programs:
            yield from _all(program)


def _planned(whole: ScheduledProgram, outside: Collection[Variable] = ()) -> Iterator[SavedValue]:
    """Returns what a function saves, and what the iterations of its loops and its branches save."""
    schedule = whole.schedule
    readers = Readers(schedule)
    names: set[str] = set()
    of_units = {(unit.path, unit.source): 0 for unit in whole.units}
    for variable, stored in schedule.stored.items():
        nested_names = {nested.name for nested in whole.nested}.intersection(
            schedule.graph.names_of(variable)
        )
        names |= nested_names
        equation = schedule.graph.program.made_by.get(variable)
        origin = module_path(equation), source_line(equation)
        if schedule.graph.is_own(variable) and origin in of_units:
            of_units[origin] += stored.nbytes(variable.aval)
            continue
        if nested_names or variable in outside:
            continue
        if schedule.graph.is_own(variable):  # of a layer of jaxcomp.nn, or an inner `checkpoint`
            nbytes = stored.nbytes(variable.aval)
            kind = variable.aval.shape, dtype_name(variable.aval.dtype)
            yield SavedValue(*origin, "", *kind, "", "code", nbytes, nbytes)
            continue
        role = schedule.roles.get(variable, "other") if equation is not None else "input"
        if role == "mask":
            # JAX traces the rule of a function such as `jax.nn.relu` once for all its callers.
            origin = origin[0], readers.line_of_first(variable) or origin[1]
        how = "exact" if stored.codec is None else str(stored.codec)
        on_host = stored.offload or variable.aval.memory_space == jax.memory.Space.Host
        decision = "offload" if on_host else how
        readers_of = readers.all_of if stored.note else readers.first_of
        read_by = readers_of(variable) if decision == "exact" else ""
        yield SavedValue(
            *origin,
            op="",
            shape=variable.aval.shape,
            dtype=dtype_name(variable.aval.dtype),
            role=role,
            decision=decision if stored.copies == 1 else f"{stored.copies} x {decision}",
            exact_bytes=plain_nbytes(variable.aval),
            saved_bytes=stored.nbytes(variable.aval),
            note="; ".join(filter(None, (stored.note, read_by and f"read by {read_by}"))),
        )
    for (path, source), saved_bytes in of_units.items():
        units = [unit for unit in whole.units if (unit.path, unit.source) == (path, source)]
        arrays = [variable.aval for unit in units for variable in unit.unit.saved]
        yield SavedValue(
            path,
            source,
            " ".join(sorted({unit.unit.kind for unit in units})),
            (sum(aval.size for aval in arrays),),
            dtype="",
            role="",
            decision=", ".join(sorted({unit.decision for unit in units})),
            exact_bytes=sum(map(plain_nbytes, arrays)),
            saved_bytes=saved_bytes,
            note="; ".join(_notes_of_units(units)),
        )
    for nested in whole.nested:
        if nested.name in names:
            yield from _of_nested(nested)


def warn_of_closed_regions(whole: ScheduledProgram) -> None:
    """Warns if more bytes wait exactly than encoded, because of regions under `jax.checkpoint`.

    Regions that a rule keeps are meant to be kept, as attentions are. Others encode while they are
    evaluated again. Less than 1 MiB is nobody's problem.
    """
    coded, exact = _coded_and_exact(whole)
    closed = [
        region
        for part in _all(whole)
        for region in part.regions
        if region.has_parameters and not (region.is_open or region.is_asked or region.encodes_again)
    ]
    if (
        exact < _WORTH_A_WARNING
        or exact <= coded
        or 2 * sum(r.iterations * r.kept_bytes for r in closed) < exact
    ):
        return
    largest = max(closed, key=lambda region: region.iterations * region.kept_bytes)
    (note,) = _notes_of_regions([largest])
    warnings.warn(
        f"less than half of the bytes that wait are encoded. {note}. Rule('open', op='checkpoint') "
        "in front of the policy's rules encodes it all the same, and Rule('keep', op='checkpoint') "
        "says that it is meant so",
        stacklevel=2,
    )


def _coded_and_exact(whole: ScheduledProgram) -> tuple[int, int]:
    """Returns the bytes of what waits encoded and of what waits as it is, both without codes."""
    graph = whole.schedule.graph
    coded = [plain_nbytes(v.aval) for unit in whole.units if unit.codec for v in unit.unit.saved]
    exact: list[int] = []
    for value, how in whole.schedule.stored.items():
        if not graph.is_own(value):
            (exact if how.codec is None else coded).append(plain_nbytes(value.aval))
    totals = [sum(coded), sum(exact)]
    for nested in whole.nested:
        for program in nested.programs:
            for i, inner in enumerate(_coded_and_exact(program)):
                totals[i] += inner * (nested.length or 1)
    return totals[0], totals[1]


def _notes_of_regions(regions: Sequence[Region]) -> list[str]:
    """Returns a note for each kind of region under `jax.checkpoint`, as for repeated blocks."""
    counts = collections.Counter(
        dataclasses.replace(region, path=without_indices(region.path)) for region in regions
    )
    notes = []
    for region, count in counts.items():
        where = ", ".join(filter(None, (region.path, region.source))) or "a function"
        times = count * region.iterations
        kept, coded = (format_bytes(times * n) for n in (region.kept_bytes, region.coded_bytes))
        again = f"{format_bytes(region.recomputed_bytes)} while one is evaluated again"
        again += ", its attentions in slices" if region.is_sliced else ""
        again += ", encoded" if region.encodes_again else ""
        number = "a region" if times == 1 else f"{times} regions"
        are = "is" if times == 1 else "are"
        if isinstance(region.action, Codec):
            bias = "" if inner_codec(region.action).is_exact else ", which is biased"
            notes.append(
                f"{where}: {number} of jax.checkpoint {are} evaluated again from inputs saved "
                f"by {region.action}{bias}"
            )
        elif region.is_open:
            notes.append(
                f"{where}: {number} of jax.checkpoint {are} open: {coded} wait instead of {kept} "
                f"and {again}"
            )
        else:
            notes.append(
                f"{where}: this block is rematerialised by jax.checkpoint"
                + (f", {times} times" if times > 1 else "")
                + f": {kept} wait, and {again}; open, {coded} would wait"
            )
    return notes


def _notes_of_units(units: Sequence[Recognized]) -> list[str]:
    """Returns how many operations share a row, and the largest bias of their norms."""
    notes = [] if len(units) == 1 else [f"{len(units)} operations"]
    of_norms = [
        (bias_of_norm(unit.unit, unit.codec), positions(unit.unit))
        for unit in units
        if isinstance(unit.unit, NormAct | NormCurve) and unit.codec is not None
    ]
    bias, count = max(of_norms, default=(0.0, 0))
    if bias > _NOTED:
        notes.append(f"a norm over {count}: bias of about {percent(bias)}")
    return notes


def _of_nested(nested: Nested) -> Iterator[SavedValue]:
    """Returns what the iterations of a loop save, or each of several branches."""
    if nested.length is None:
        yield from _of_branches(nested.programs)
        return
    of_all = f"{nested.length} iterations" if nested.length > 1 else ""
    of_all += f", encoded in chunks of {nested.chunk}" if nested.chunk > 1 else ""
    for value in _planned(nested.programs[0]):
        yield dataclasses.replace(
            value,
            shape=(nested.length, *value.shape) if nested.length > 1 else value.shape,
            exact_bytes=nested.length * value.exact_bytes,
            saved_bytes=nested.length * value.saved_bytes,
            note="; ".join(filter(None, (of_all, value.note))),
        )


def _of_branches(branches: Sequence[ScheduledProgram]) -> Iterator[SavedValue]:
    """Returns what each branch saves, but for operands, which are saved outside.

    Values of equal types in several branches share their memory. It is that of the first.
    """
    taken: collections.Counter[tuple[object, ...]] = collections.Counter()
    for number, branch in enumerate(branches):
        invars = branch.schedule.graph.program.arguments
        outside = {invars[position] for position in branch.stored_operands.values()}
        of_branch: collections.Counter[tuple[object, ...]] = collections.Counter()
        for value in _planned(branch, outside):
            key = value.op, value.shape, value.dtype, value.decision
            of_branch[key] += 1
            is_shared = of_branch[key] <= taken[key]
            notes = f"branches[{number}]", "in another branch's memory" * is_shared, value.note
            yield dataclasses.replace(
                value,
                saved_bytes=0 if is_shared else value.saved_bytes,
                note="; ".join(filter(None, notes)),
            )
        taken |= of_branch


_NAMED = 2


class Readers:
    """The equations of the backward pass that read each saved value.

    They have the source lines of the forward pass.
    """

    def __init__(self, schedule: Schedule) -> None:
        """Follows the coefficients of the backward program back to what is saved."""
        self._direct: dict[Any, dict[tuple[str, str], None]] = {}
        backward = schedule.backward
        inputs = dict(zip(backward.arguments, schedule.coefficients, strict=False))
        for equation in backward.equations:
            for atom in equation.invars:
                coefficient = inputs.get(atom) if is_variable(atom) else None
                if coefficient is not None and is_variable(coefficient.value):
                    where = source_call(equation), source_line(equation)
                    self._direct.setdefault(coefficient.value, {})[where] = None
        self._all = {value: dict(calls) for value, calls in self._direct.items()}
        for value in reversed(schedule.graph.order):
            if value in self._all and value not in schedule.stored:
                for operand in schedule.graph.operands(value):
                    self._all.setdefault(operand, {}).update(self._all[value])

    def line_of_first(self, value: Variable) -> str:
        """Returns the source line of the first reader, or ""."""
        return next((line for _, line in self._direct.get(value, ())), "")

    def all_of(self, value: Variable) -> str:
        """Returns the user's calls that read a value, or what is computed from it.

        It is "" if there are none.
        """
        calls = list(self._all.get(value, ()))
        more = [f"{len(calls) - _NAMED} more"] if len(calls) > _NAMED else []
        return " and ".join([*map(_described, calls[:_NAMED]), *more])

    def first_of(self, value: Variable) -> str:
        """Returns the first user's call that reads a value; "" if there is none."""
        calls = {**self._direct.get(value, {}), **self._all.get(value, {})}
        return next(map(_described, calls), "")


def _described(where: tuple[str, str]) -> str:
    return ", ".join(filter(None, where))
