"""The integer program of a plan, from steps that were compiled."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Literal

from jaxcomp.memory._targets import Target
from jaxcomp.planning._groups import block_of, coded, in_blocks
from jaxcomp.planning._noise import Noise
from jaxcomp.planning._probe import Probe, bandwidth_of
from jaxcomp.planning._solver import Choice, Moment, Problem

Action = Literal["keep", "quantize", "recompute", "offload", "accumulate"]


@dataclasses.dataclass(frozen=True)
class Known:
    """What was compiled and traced of a model.

    Attributes:
        plain: The plain step.
        quantized: The steps with all values quantized, by their bits; empty if that is not allowed.
        keeps_products: Whether the quantized steps keep products that have to be exact.
        declared: Bytes that steps which are not compiled intend to save, by bits and group.
        recomputed: The step with each block recomputed; None if that is not allowed.
        keeps: Whether a group may be kept that could be quantized.
        noise: Of the codes; None if it was not measured.
        most_noise: The largest standard deviation of the gradient, in units of SGD's.
        offloaded: The step with all saved values in the host's memory, by its name; None if that is
            not allowed.
    """

    plain: Probe
    quantized: Mapping[int, Probe]
    keeps_products: bool
    declared: Mapping[int, Mapping[str, int]]
    recomputed: Probe | None
    keeps: bool
    noise: Noise | None = None
    most_noise: float = math.inf
    offloaded: tuple[str, Probe] | None = None

    @property
    def bits(self) -> int:
        """The most bits of a compiled step."""
        return max(self.quantized)


def make_problem(known: Known, pinned: Mapping[str, str], target: Target) -> Problem:
    """Returns the choices of each group, and the moments of the compiled steps.

    Fewer bits than those of compiled steps are only for groups that are pinned to them: their time
    is not known.

    Args:
        known: What was compiled.
        pinned: Choices that are given, by group.
        target: What the steps are compiled for.

    Raises:
        ValueError: If a group cannot have the choice that is given.
    """
    recomputed = [] if known.recomputed is None else [known.recomputed]
    probes = [known.plain, *known.quantized.values(), *recomputed]
    names = sorted({g for p in probes for g in (*p.saved, *p.seconds_of, *p.declared)})
    blocks: dict[str, list[str]] = collections.defaultdict(list)
    for group in names:
        if block := block_of(group):
            blocks[block].append(group)

    def choices(group: str) -> dict[str, Choice]:
        found = {"keep": _kept(known, group)}
        for bits in {*known.quantized, *known.declared}:
            name = coded(bits, known.keeps_products)
            if bits in known.quantized or bits > known.bits or pinned.get(group) == name:
                found[name] = _of_bits(known, group, bits, target)
        if known.recomputed is not None and block_of(group):
            found["recompute"] = _choice(known.recomputed, group)
        if known.offloaded is not None:
            found[known.offloaded[0]] = _choice(known.offloaded[1], group)
        if known.noise is not None:
            found = {
                n: dataclasses.replace(c, noise=known.noise.of(group, n)) for n, c in found.items()
            }
        if group in pinned:
            if pinned[group] not in found:
                raise ValueError(
                    f"pin: {group or 'the model'} cannot have {pinned[group]!r}, but {list(found)}"
                )
            return {pinned[group]: found[pinned[group]]}
        if not known.keeps and len(found) > 1:
            del found["keep"]
        return found

    options = {group: choices(group) for group in names}
    free = [b for b in blocks.values() if all("recompute" in options[group] for group in b)]
    for group, named in options.items():
        if not any(group in b for b in free):
            named.pop("recompute", None)
    moments = list(_moments(known, options))
    in_order = sorted(names, key=in_blocks)
    neighbours = [pair for pair in itertools.pairwise(in_order) if all(map(block_of, pair))]
    return Problem(options, moments, {"recompute": free}, known.most_noise**2, neighbours)


def _moments(known: Known, options: Mapping[str, Collection[str]]) -> Iterator[Moment]:
    """Returns the moments of the compiled steps, with the choices for which each counts.

    Args:
        known: What was compiled.
        options: The names of the choices of each group.
    """
    for probe, like in _examples(known):
        for moment in _with_all_groups(probe.moments, options):
            names = options.get(moment.group, ()) if moment.group else ()
            alike = [name for name in names if name in like]
            if alike or not names:
                yield dataclasses.replace(moment, names=alike)


def _examples(known: Known) -> Iterator[tuple[Probe, set[str]]]:
    """Returns the compiled steps, and the choices of which each is an example.

    Bits of which no step was compiled are computed with as those of the step of the most bits. So
    is what is kept, where the plain step was rejected for lack of memory.
    """
    if known.plain.moments:
        yield known.plain, {"keep"}
    for bits, probe in known.quantized.items():
        like = {bits} | ({*known.declared} if bits == known.bits else set())
        others = {"keep"} if bits == known.bits and not known.plain.moments else set()
        yield probe, {coded(b, known.keeps_products) for b in like} | others
    if known.recomputed is not None:
        yield known.recomputed, {"recompute"}
    if known.offloaded is not None:
        yield known.offloaded[1], {known.offloaded[0]}


def _choice(probe: Probe, group: str) -> Choice:
    return Choice(probe.saved.get(group, 0), probe.seconds_of.get(group, 0.0))


def _kept(known: Known, group: str) -> Choice:
    """Returns what a group saves as it is: at least what its codes take.

    In the plain step another group may save the same value. Where that step was rejected for lack
    of memory, the bytes are in proportion to those that it declares, and the time is that of the
    quantized step.
    """
    plain = known.plain
    if not known.quantized:
        return _choice(plain, group)
    quantized = known.quantized[known.bits]
    if plain.moments:
        kept = _choice(plain, group)
        return dataclasses.replace(kept, bytes=max(kept.bytes, quantized.saved.get(group, 0)))
    declared = sum(quantized.declared.values())
    ratio = sum(quantized.saved.values()) / declared if declared else 1.0
    return Choice(ratio * plain.declared.get(group, 0), quantized.seconds_of.get(group, 0.0))


def _of_bits(known: Known, group: str, bits: int, target: Target) -> Choice:
    """Returns what bits make of a group.

    Where no step of so many was compiled, the bytes are in proportion to those that it declares.
    """
    if bits in known.quantized:
        return _choice(known.quantized[bits], group)
    quantized = known.quantized[known.bits]
    choice = _choice(quantized, group)
    before = quantized.declared.get(group, 0)
    if not before:
        return choice
    size = choice.bytes * known.declared[bits].get(group, 0) / before
    moved = 2 * (size - choice.bytes)  # a code is written once and read once
    return Choice(size, choice.seconds + moved / bandwidth_of(target))


def _with_all_groups(moments: Iterable[Moment], names: Iterable[str]) -> Iterable[Moment]:
    """Returns moments with a fraction for groups that a step saves nothing of."""
    for moment in moments:
        of_block: dict[str, list[float]] = collections.defaultdict(list)
        for group, fraction in moment.alive.items():
            of_block[block_of(group)].append(fraction)
        alive = dict(moment.alive)
        for group in names:
            fractions = of_block.get(block_of(group), [])
            if group not in alive and block_of(group) and fractions:
                alive[group] = max(fractions)
        yield dataclasses.replace(moment, alive=alive)
