"""Compiles the exact strategies and the quantized step, then plans."""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import jax
from flax import nnx

from jaxcomp.codecs import Quantize
from jaxcomp.planning._blocks import FirstBlocks, first_blocks, seconds_of_each, shares_of
from jaxcomp.planning._groups import bits_of, coded, pattern_of, policy_of, rules_of
from jaxcomp.planning._improve import Plans, Variant, improve
from jaxcomp.planning._noise import Data, Noise, alike, measure, meter
from jaxcomp.planning._probe import Probe
from jaxcomp.planning._problem import Action, Known, make_problem
from jaxcomp.planning._search import Candidate, Search
from jaxcomp.planning._solver import Problem
from jaxcomp.planning._strategies import OPEN, Strategy
from jaxcomp.policies._policy import Policy
from jaxcomp.policies._rule import REGION, Rule

T = TypeVar("T")
_OF_OFFLOAD = 2  # compilations
_OF_FEWER_BITS = 1
_OF_OPEN = 3
_NEAR = 0.03  # of the budget: a plan that needs so much more is worth another compilation
_EXTRAPOLATED = 1.05  # micro-batches may be faster than extrapolated by so much
_PART = 1 / 3  # of the blocks: to keep the products of fewer is not worth a compilation


@dataclasses.dataclass(frozen=True)
class Allowed:
    """What a plan may do.

    Attributes:
        actions: Its kinds of choices.
        bits: Bits of a quantized element.
        biased: Whether batch norms may have 2-bit codes, which are biased.
        pinned: Choices that are given, by group.
        split_batch_statistics: Whether batch norms may see fewer images.
        data: What the noise of codes is measured on.
    """

    actions: Collection[Action]
    bits: Sequence[int]
    biased: bool
    pinned: Mapping[str, str]
    split_batch_statistics: bool
    data: Data | None = None

    def admits(self, strategy: Strategy) -> bool:
        """Returns whether a strategy of all values alike does what is pinned."""
        keeps = strategy.policy is None and not strategy.remat
        if keeps and strategy.micro_batches == 1 and "keep" not in self.actions:
            return False
        return not self.pinned or (keeps and set(self.pinned.values()) == {"keep"})

    def uniform(self, choice: str) -> Strategy:
        """Returns the strategy of one choice for all values."""
        return Strategy.of(Policy(rules_of(choice, self.biased)))


def run(search: Search, models: Sequence[Any], allowed: Allowed, has_regions: bool) -> None:
    """Compiles the plain step, and if that does not fit all else that is allowed.

    Args:
        search: Where it is compiled.
        models: What the step factory applies a strategy to.
        allowed: What a plan may do.
        has_regions: Whether the author computes parts of the plain step again. It is then also
            compiled without that, which may be faster, and with the inputs of these parts encoded.
    """
    plain = search.compile("plain", Strategy.parse("plain"))
    if has_regions and "keep" in allowed.actions:
        _open_regions(search, plain)
    if search.best() is not None:
        return
    quantized = recomputed = None
    bits = allowed.bits if "quantize" in allowed.actions else ()
    middle = min(bits, key=lambda b: abs(b - 4), default=4)
    uniform = {b: allowed.uniform(coded(b)) for b in bits}
    remat = Strategy.parse("remat")
    recomputes = "recompute" in allowed.actions
    first = [*([uniform[middle]] if bits else []), *([remat] if recomputes else [])]
    if search.left >= len(first):
        search.prepare(first)
    if bits and search.left:
        quantized = _tried(search, coded(middle), uniform[middle])
    groups = [] if quantized is None else sorted({*quantized.declared, *plain.declared})
    if quantized is not None and allowed.data is not None:
        search.noise = _measured(search, allowed.data, groups, middle, allowed)
    if recomputes and search.left:
        recomputed = _tried(search, "remat", remat)
    shares = shares_of(search.groups, plain) if {"keep", "recompute"} <= {*allowed.actions} else []
    if recomputed is not None:
        least = recomputed.report.total_bytes if shares else None
        _try_if_it_may_fit(search, plain, "remat:weights", least)
        _try_if_it_may_fit(search, plain, "exact")
    pinned_bits = {*map(bits_of, allowed.pinned.values())}
    estimated = {b for b in bits if b > middle} | ({*bits} & pinned_bits - {middle})
    known = Known(
        plain,
        {} if quantized is None else {middle: quantized},
        False,
        {} if quantized is None else {b: search.declared(uniform[b]) for b in estimated},
        recomputed if search.groups.recomputes else None,
        "keep" in allowed.actions,
        search.noise,
        search.most_noise,
    )
    kept = _kept_products(search, known, allowed)
    if "accumulate" in allowed.actions:
        if allowed.split_batch_statistics or _have_no_statistics(models):
            _accumulate(search, plain)
        else:
            search.notes.append(
                "no micro-batches: batch norms would see fewer images (or the model is a function, "
                "of which that is not known); split_batch_statistics=True allows them"
            )
    fewer = sorted((b for b in bits if b < middle), reverse=True) if quantized is not None else []
    also = [middle] if allowed.pinned and quantized is not None else []
    tried = {b: uniform[b] for b in [*also, *fewer]}
    fewer_first = bool(allowed.pinned) or (
        bool(fewer) and _may_fit(search, quantized, fewer[-1], uniform)
    )
    may_offload = "offload" in allowed.actions and search.target.link_bandwidth is not None
    reserved = _OF_OFFLOAD if may_offload else 0
    if quantized is not None or recomputed is not None:
        exact = first_blocks(search.found, plain, recomputed, [] if allowed.pinned else shares)
        _improve(search, [known, *kept], allowed, reserved + _OF_FEWER_BITS * fewer_first, exact)
    if fewer_first:
        _fewer_bits(search, known, tried, groups, allowed, reserved)
    if may_offload:
        _offload(search, known, allowed)
    if not fewer_first:
        _fewer_bits(search, known, tried, groups, allowed, reserved=0)
    if has_regions and bits and allowed.biased and search.best() is None and search.left:
        inputs = Policy((Rule(Quantize(max(bits)), op=REGION),))
        _tried(search, f"inputs of regions in {coded(max(bits))}", Strategy.of(inputs))
    if search.best() is None and "offload" in allowed.actions and not may_offload:
        search.notes.append(
            f"no offload: the bandwidth between {search.target.name} and its host is not known"
        )


def _measured(
    search: Search, data: Data, groups: Sequence[str], middle: int, allowed: Allowed
) -> Noise:
    """Returns the noise of codes on the user's data."""
    bits = {middle, *({2} & {*allowed.bits})}  # 2 bits: batch norms have 3
    size = jax.tree.leaves(data[2])[0].shape[0]
    part = min(1.0, size / search.batch)
    variance = meter(data, allowed.biased, part, search.progress)
    return measure(variance, alike(groups), bits, search.progress)


def _may_fit(
    search: Search, quantized: Probe | None, bits: int, uniform: Mapping[int, Strategy]
) -> bool:
    """Returns whether a step in fewer bits may fit, by what it saves less than a compiled one."""
    if quantized is None or search.best() is not None:
        return False
    declared = _attempt(search, coded(bits), lambda: search.declared(uniform[bits]))
    if declared is None:
        return False
    less = sum(quantized.declared.values()) - sum(declared.values())
    needed = (quantized.report.total_bytes or 0) - less / search.target.devices
    return needed <= (1 + _NEAR) * search.budget


def _try_if_it_may_fit(search: Search, plain: Probe, spec: str, least: int | None = None) -> None:
    """Compiles a strategy that recomputes a part, if the arguments and what it saves may fit.

    "exact" recomputes cheap steps alone, and differentiates attentions in parts.

    Args:
        search: Where it is compiled.
        plain: The plain step.
        spec: The strategy.
        least: What the step needs that recomputes all blocks. With it, it is enough that the
            strategy may fit for a part of the blocks.
    """
    strategy = Strategy.parse(spec)
    declared = _attempt(search, spec, lambda: search.declared(strategy))
    if declared is None or not search.left:
        return
    needed = (plain.report.argument_bytes or 0) + sum(declared.values()) / search.target.devices
    if least is not None:
        needed = least + _PART * (needed - least)
    if needed <= search.budget:
        _tried(search, spec, strategy)


def _open_regions(search: Search, plain: Probe) -> None:
    """Compiles the step without its author's recomputation, or with that of the first blocks alone.

    As many of the last blocks are open as fit.
    """
    strategy = Strategy.parse("open")
    more = sum(search.declared(strategy).values()) - sum(plain.declared.values())
    _try_if_it_may_fit(search, plain, "open")
    blocks = search.groups.blocks
    few, many = 0, len(blocks)  # what fits, and what does not
    needed = {few: plain.report.total_bytes or 0}
    needed[many] = needed[few] + max(1, more // search.target.devices)
    for _ in range(_OF_OPEN):
        best = search.best()
        if best is None or best.strategy == strategy or many - few < 2 or not search.left:
            return
        room = (search.budget - needed[few]) / max(1, needed[many] - needed[few])
        number = min(max(few + 1, int(few + room * (many - few))), many - 1)
        closed = Rule("keep", op=REGION, path=pattern_of(blocks[:-number]), required=False)
        policy = Policy((closed, *OPEN.rules))
        result = _tried(search, f"open in {number} of {len(blocks)} blocks", Strategy.of(policy))
        if result is None:
            return
        needed[number] = result.report.total_bytes or 0
        few, many = (number, many) if search.fits(result) else (few, number)


def _kept_products(search: Search, known: Known, allowed: Allowed) -> list[Known]:
    """Compiles codes with products that have to be exact kept, if that is expected to fit."""
    if not known.quantized or not search.left or any(map(bits_of, allowed.pinned.values())):
        return []
    before = known.quantized[known.bits]
    strategy = allowed.uniform(coded(known.bits, True))
    more = sum(search.declared(strategy).values()) - sum(before.declared.values())
    if more <= 0 or (before.report.total_bytes or 0) + more > search.budget:
        return []
    quantized = _tried(search, coded(known.bits, True), strategy)
    if quantized is None:
        return []
    others = {b: search.declared(allowed.uniform(coded(b, True))) for b in known.declared}
    kept = {known.bits: quantized}
    return [dataclasses.replace(known, quantized=kept, keeps_products=True, declared=others)]


def _improve(
    search: Search,
    known: Sequence[Known],
    allowed: Allowed,
    reserved: int,
    exact: Sequence[FirstBlocks] = (),
) -> None:
    """Solves and compiles plans; while none nearly fits, so many compilations are left over."""

    def compile_plan(assignment: Mapping[str, str] | str, micro_batches: int) -> Probe | None:
        if isinstance(assignment, str):
            split = f"accumulate:{micro_batches}:" * (micro_batches > 1)
            return _tried(search, split + assignment, Strategy.parse(split + assignment))
        number = sum(candidate.assignment is not None for candidate in search.found) + 1
        name = f"plan {number}" + (f", accumulate:{micro_batches}" if micro_batches > 1 else "")
        strategy = Strategy.of(policy_of(assignment, allowed.biased))
        return _tried(
            search, name, dataclasses.replace(strategy, micro_batches=micro_batches), assignment
        )

    def best_seconds() -> float:
        best = search.best()
        return math.inf if best is None else best.result.seconds

    def left() -> int:
        return max(0, search.left - (0 if _nearly_fits(search) else reserved))

    variants = [
        variant
        for each in known
        for variant in _variants(search, each, make_problem(each, allowed.pinned, search.target))
    ]
    kinds: list[Plans] = [*variants, *exact]
    search.errors += improve(kinds, search.budget, compile_plan, left, best_seconds)


def _nearly_fits(search: Search) -> bool:
    """Returns whether something fits, or a plan would with a small correction."""
    nearly = (1 + _NEAR) * search.budget
    return search.best() is not None or any(
        0 < (c.result.report.total_bytes or 0) <= nearly
        for c in search.found
        if c.assignment is not None or c.strategy.first_blocks is not None
    )


def _offload(search: Search, known: Known, allowed: Allowed) -> None:
    """Tries all saved values in the host's memory, and plans with that, if nothing fits."""
    if search.best() is not None or not search.left:
        return
    choice = f"offload:{coded(known.bits)}" if known.quantized else "offload"
    offloaded = _tried(search, choice, allowed.uniform(choice))
    if offloaded is not None:
        _improve(
            search, [dataclasses.replace(known, offloaded=(choice, offloaded))], allowed, reserved=0
        )


def _fewer_bits(
    search: Search,
    known: Known,
    uniform: Mapping[int, Strategy],
    groups: Sequence[str],
    allowed: Allowed,
    reserved: int,
) -> None:
    """Tries fewer bits for all values but pinned ones, and plans with both, until one fits."""
    for bits, strategy in uniform.items():
        if search.best() is not None or not search.left:
            return
        if allowed.pinned:
            assignment = {group: allowed.pinned.get(group, coded(bits)) for group in groups}
            pinned = Strategy.of(policy_of(assignment, allowed.biased))
            result = _tried(search, f"{coded(bits)} but for pin", pinned, assignment)
        else:
            result = _tried(search, coded(bits), strategy)
        if result is not None and bits not in known.quantized:
            known = dataclasses.replace(known, quantized={**known.quantized, bits: result})
            _improve(search, [known], allowed, reserved)


def _tried(
    search: Search,
    name: str,
    strategy: Strategy,
    assignment: Mapping[str, str] | None = None,
) -> Probe | None:
    """Compiles a strategy; None, with a note, where the model or the compiler refuses it."""
    return _attempt(search, name, lambda: search.compile(name, strategy, assignment))


def _attempt(search: Search, name: str, run: Callable[[], T]) -> T | None:
    """Returns the result; None, with a note, where the model or the compiler raises an error."""
    try:
        return run()
    except Exception as error:  # of the user's code, too: other strategies may fit
        first = (str(error).strip().splitlines() or [""])[0]
        note = f"{name} failed: {type(error).__name__}: {first}"
        search.notes += [note] * (note not in search.notes)
        return None


def _accumulate(search: Search, plain: Probe) -> None:
    """Compiles the fewest micro-batches that are estimated to fit.

    Twice as many are compiled unless something that fits is expected to be faster by 5%. Their time
    is extrapolated from that of the plain step and of the last one.
    """
    given, total = plain.report.argument_bytes or 0, plain.report.total_bytes or 0
    count, tries = 2, 2
    expected = 0.0  # seconds; nothing is known of the first
    if search.batch % count:
        search.notes.append(f"no micro-batches: batch={search.batch} is odd")
    while search.batch % count == 0 and search.left and tries:
        best = search.best()
        if best is not None and expected > _EXTRAPOLATED * best.result.seconds:
            return
        if given + (total - given) / count <= search.budget:
            name = f"accumulate:{count}"
            result = _tried(search, name, Strategy.parse(name))
            if result is None:
                return
            fits = search.fits(result)
            if fits and search.best() is None:  # it is not allowed
                return
            tries -= not fits
            more_seconds = seconds_of_each(plain.seconds, result.seconds, count)
            expected = plain.seconds + more_seconds * (2 * count - 1)
        count *= 2


def _beyond_estimate(search: Search, known: Known, problem: Problem) -> float:
    """Returns what the step of one choice nearest to the budget needs beyond its estimate.

    It is 0 where the estimate is too high: that is of the moments of another step.
    """
    names = {coded(bits, known.keeps_products): p for bits, p in known.quantized.items()}
    found = [
        (total, total - problem.peak(dict.fromkeys(problem.choices, name))[0])
        for name, probe in [("keep", known.plain), *names.items()]
        if (total := probe.report.total_bytes)
        and all(name in named for named in problem.choices.values())
    ]
    nearest = min(found, key=lambda item: abs(item[0] - search.budget), default=(0, 0.0))
    return max(0.0, nearest[1])


def _variants(search: Search, known: Known, problem: Problem) -> list[Variant]:
    """Plans for the whole batch, and for as many micro-batches as were the fastest, or fewer.

    Where micro-batches fit as they are, other plans with as many are hardly faster.
    """
    plain, *others = search.found
    split = [c for c in others if c.strategy.micro_batches > 1]
    found = [Variant(1, problem, _beyond_estimate(search, known, problem))]
    if not split:
        return found
    given = plain.result.report.argument_bytes or 0
    most_bytes = {
        group: max(named, key=lambda name: named[name].bytes)
        for group, named in problem.choices.items()
    }
    most = min((c for c in split if search.fits(c.result)), key=_seconds, default=split[-1])
    count = most.strategy.micro_batches
    more_seconds = seconds_of_each(plain.result.seconds, most.result.seconds, count)
    expected, _ = problem.split(count, given).peak(most_bytes)
    more_bytes = (most.result.report.total_bytes or 0) - expected
    number = 2
    while number < count or (number == count and not search.fits(most.result)):
        part = problem.split(number, given)
        found.append(Variant(number, part, more_bytes, more_seconds * (number - 1)))
        number *= 2
    return found


def _seconds(candidate: Candidate) -> float:
    return candidate.result.seconds


def _have_no_statistics(models: Sequence[Any]) -> bool:
    """Returns whether all models are of Flax NNX and have no batch norm."""
    return all(
        isinstance(model, nnx.Module) and not jax.tree.leaves(nnx.state(model, nnx.BatchStat))
        for model in models
    )
