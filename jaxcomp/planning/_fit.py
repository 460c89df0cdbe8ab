"""`fit`: a budget of bytes in, a strategy out that was compiled and fits."""

import functools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import jax
from flax import nnx

from jaxcomp.memory._analyze import usable_bytes
from jaxcomp.memory._compiling import CompileError
from jaxcomp.memory._declared import takes_gradient
from jaxcomp.memory._live_bytes import format_bytes
from jaxcomp.memory._targets import Target, resolve
from jaxcomp.planning._budget import bytes_of
from jaxcomp.planning._fitted import Compiled, FittedPlan, Part
from jaxcomp.planning._groups import Groups, policy_of, rules_of
from jaxcomp.planning._improve import Variant, improve
from jaxcomp.planning._probe import Probe, declared_bytes, probe, trace_scoped
from jaxcomp.planning._problem import Action, Known, make_problem
from jaxcomp.planning._solver import Problem
from jaxcomp.planning._strategies import Strategy
from jaxcomp.planning._watched import MakeStep, NoMicroBatchesError
from jaxcomp.policies._policy import Policy

ACTIONS: tuple[Action, ...] = get_args(Action)
BITS = (8, 4, 3, 2)
_REMEMBERED = 64  # steps, for further budgets


class DoesNotFitError(ValueError):
    """No strategy that was compiled fits the budget."""


@dataclass
class _Candidate:
    """A strategy that was compiled, and for a plan what it does with each group."""

    name: str
    strategy: Strategy
    result: Probe
    assignment: Mapping[str, str] | None = None


@dataclass
class _Search:
    """Compiles strategies, at most so many."""

    make_step: MakeStep
    batch: int
    target: Target
    budget: int
    compiles: int
    progress: Callable[[str], AbstractContextManager[Any]]
    groups: Groups
    found: list[_Candidate] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def compile(
        self, name: str, strategy: Strategy, assignment: Mapping[str, str] | None = None
    ) -> Probe:
        """Compiles a strategy and remembers it."""
        with self.progress(name):
            result = _compiled(self.make_step, strategy, self.batch, self.target, self.groups)
        self.found.append(_Candidate(name, strategy, result, assignment))
        return result

    def declared(self, strategy: Strategy) -> Mapping[str, int]:
        """Bytes that a step intends to save, by group."""
        return _declared(self.make_step, strategy, self.batch, self.target, self.groups)

    @property
    def left(self) -> int:
        """How many more may be compiled."""
        return self.compiles - len(self.found)

    def fits(self, result: Probe) -> bool:
        total = result.report.total_bytes
        return bool(result.moments) and total is not None and total <= self.budget

    def best(self) -> _Candidate | None:
        """The fastest that fits; of equally fast ones the exact one, which comes first."""
        fitting = [c for c in self.found if self.fits(c.result)]
        return min(fitting, key=lambda c: c.result.seconds) if fitting else None


@functools.lru_cache(_REMEMBERED)
def _compiled(
    make_step: MakeStep, strategy: Strategy, batch: int, target: Target, groups: Groups
) -> Probe:
    traced, _ = trace_scoped(make_step, strategy, batch, target)
    # The plain step is planned from: it is compiled as if it fitted. TPU compilers refuse that.
    xla_remat = not strategy.is_plain or target.platform == "tpu"
    return probe(traced, target, None, groups, xla_remat=xla_remat)


@functools.lru_cache(_REMEMBERED)
def _declared(
    make_step: MakeStep, strategy: Strategy, batch: int, target: Target, groups: Groups
) -> Mapping[str, int]:
    return declared_bytes(trace_scoped(make_step, strategy, batch, target)[0], groups)


def fit(
    make_step: MakeStep,
    *,
    batch: int,
    budget: int | str | None = None,
    target: str | None = None,
    actions: Sequence[Action] = ACTIONS,
    bits: Sequence[int] = BITS,
    biased: bool = False,
    pin: Mapping[str, str] | None = None,
    split_batch_statistics: bool = False,
    compiles: int = 8,
    progress: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> FittedPlan:
    """Finds the fastest way to make a training step fit a budget of memory.

    The budget is for all that XLA needs on the target: arguments, outputs and temporary memory. The
    step is compiled as it is, with all values quantized, and with its blocks recomputed. From these
    an integer program chooses what to do with each group of modules, so that the estimated time is
    least and no moment of the step exceeds the budget. Its plan is compiled, the estimate is
    corrected, and the program is solved again. Nothing is run. Only what was compiled and fits is
    returned, and an exact strategy wins where it is estimated to be as fast.

    Compiled steps are remembered for the same factory, so that further budgets take less time.

    The time is that of the HBM traffic and of the FLOPs at the target's peak rates; on a TPU it is
    XLA's estimate of the cycles. It ranks strategies and is no prediction of the step time.

    Args:
        make_step: The step factory, as `compare` takes it.
        batch: The batch size.
        budget: Bytes, or text such as "11GiB". By default, what a step may use of the target's
            memory.
        target: The target's name, as in `analyze`. By default, the attached device.
        actions: What a plan may do: "keep" a value, "quantize" it, "recompute" blocks, or
            "accumulate" gradients of micro-batches.
        bits: Bits of a quantized element that a plan may use, of 8, 4, 3 and 2. Fewer than 4 are
            used only where a plan without them does not fit.
        biased: Whether batch norms may have codes that clip (`recipes.fused`), which are faster and
            bias the gradient.
        pin: Choices that are given, by a regular expression for paths of modules: "keep",
            "recompute" or "quantize:bits=N". `{"head/.*": "keep"}` is for a head and all in it.
        split_batch_statistics: Whether gradients may be accumulated where a batch norm would then
            see fewer images, or where that is not known, as of a function.
        compiles: The largest number of compilations.
        progress: Is entered with a strategy's name while it is compiled.

    Returns:
        The plan. Its `strategy` is for a step factory, its `policy` for `compress` and
        `checkpoint`.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If an argument is not what it should be; if the step takes no gradient, or the
            budget is less than its arguments; or, as `DoesNotFitError`, if nothing that was
            compiled fits.
        ImportError: If the wheel with the target's compiler is not installed.
        CompileError: If the plain step does not compile.

    Example:
        >>> import jax.numpy as jnp
        >>> def make_step(transform, batch):
        ...     def block():
        ...         return nnx.Sequential(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), jnp.sin)
        ...     model = transform(nnx.eval_shape(lambda: nnx.Sequential(block(), block())))
        ...     gradient = nnx.grad(lambda model, x: model(x).sum())
        ...     return gradient, (model, jax.ShapeDtypeStruct((batch, 64), jnp.float32))
        >>> plan = fit(make_step, batch=1024, budget="4MiB", target="cpu")
        >>> plan.spec
        'plain'
    """
    check(actions, bits, compiles)
    where = resolve(target)
    room = room_of(budget, target)
    plain = Strategy.parse("plain")
    plain.check_batch(batch)
    traced, models = trace_scoped(make_step, plain, batch, where)
    groups = Groups.of(models)
    pinned = _pinned(pin or {}, groups, bits)
    if not takes_gradient(traced.jaxpr):
        raise ValueError("make_step: expected a step that takes a gradient")
    given = sum(leaf.size * leaf.dtype.itemsize for leaf in traced.arguments) // where.devices
    if room < given:
        raise ValueError(
            f"budget={format_bytes(room)}: the arguments of the step alone (parameters, state and "
            f"batch) take {format_bytes(given)}"
        )
    search = _Search(make_step, batch, where, room, compiles, progress, groups)
    errors: list[float] = []
    try:
        _run(search, models, actions, bits, biased, pinned, split_batch_statistics, errors)
    except KeyboardInterrupt:
        if search.best() is None:
            raise
        search.notes.append("stopped early: the best that was compiled until then")
    return _plan(search, errors)


def _run(
    search: _Search,
    models: list[Any],
    actions: Collection[Action],
    bits: Sequence[int],
    biased: bool,
    pinned: Mapping[str, str],
    split_batch_statistics: bool,
    errors: list[float],
) -> None:
    """Compiles the exact strategies, then plans."""
    plain = search.compile("plain", Strategy.parse("plain"))
    if search.fits(plain) and not pinned:
        return
    quantized = recomputed = None
    middle = min(bits, key=lambda b: abs(b - 4)) if bits else 4
    declared: dict[int, Mapping[str, int]] = {}
    if "quantize" in actions and bits and search.left:
        uniform = {b: Strategy.of(Policy(rules_of(f"quantize:bits={b}", biased))) for b in bits}
        quantized = search.compile(f"quantize:bits={middle}", uniform[middle])
        declared = {b: search.declared(strategy) for b, strategy in uniform.items()}
    if "recompute" in actions and search.left:
        try:
            recomputed = search.compile("remat", Strategy.parse("remat"))
        except (ValueError, CompileError) as error:  # such as: no blocks in a list
            search.notes.append(f"nothing is recomputed: {error}")
    if "accumulate" in actions and not (split_batch_statistics or _has_no_statistics(models)):
        search.notes.append(
            "no micro-batches: batch norms would see fewer images (or the model is a function, of "
            "which that is not known); split_batch_statistics=True allows them"
        )
    elif "accumulate" in actions:
        try:
            _accumulate(search, plain)
        except NoMicroBatchesError as error:
            search.notes.append(f"no micro-batches: {error}")
    if quantized is None and recomputed is None:
        return
    layers = search.groups.has_layers
    known = Known(plain, quantized, middle, declared, None if layers else recomputed)
    variants = _variants(search, make_problem(known, pinned, search.target))

    def compile_plan(assignment: Mapping[str, str], micro_batches: int) -> Probe:
        number = sum(candidate.assignment is not None for candidate in search.found) + 1
        strategy = Strategy.of(policy_of(assignment, biased))
        spec = f"plan {number}" + (f", accumulate:{micro_batches}" if micro_batches > 1 else "")
        strategy = replace(strategy, micro_batches=micro_batches)
        return search.compile(spec, strategy, assignment)

    def best_seconds() -> float:
        best = search.best()
        return math.inf if best is None else best.result.seconds

    errors += improve(variants, search.budget, compile_plan, lambda: search.left, best_seconds)


def _accumulate(search: _Search, plain: Probe) -> None:
    """Compiles the fewest micro-batches that are estimated to fit."""
    saved, total = sum(plain.saved.values()), plain.report.total_bytes or 0
    count = 2
    while search.batch % count == 0 and search.left > 1:
        if total - saved * (1 - 1 / count) <= search.budget:
            result = search.compile(f"accumulate:{count}", Strategy.parse(f"accumulate:{count}"))
            if search.fits(result):
                return
        count *= 2


def _variants(search: _Search, problem: Problem) -> list[Variant]:
    """Plans for the whole batch, and for fewer micro-batches than were compiled to fit."""
    plain, *others = search.found
    split = [c for c in others if c.strategy.micro_batches > 1]
    found = [Variant(1, problem)]
    if not split:
        return found
    given = plain.result.report.argument_bytes or 0
    keep = dict.fromkeys(problem.choices, "keep")
    most = split[-1]
    count = most.strategy.micro_batches
    more_seconds = (most.result.seconds - plain.result.seconds) / (count - 1)
    expected, _ = problem.split(count, given).peak(keep)
    more_bytes = (most.result.report.total_bytes or 0) - expected
    number = 2
    while number <= count:
        part = problem.split(number, given)
        found.append(Variant(number, part, more_bytes, more_seconds * (number - 1)))
        number *= 2
    return found


def _plan(search: _Search, errors: list[float]) -> FittedPlan:
    best = search.best()
    if best is None:
        raise _does_not_fit(search)
    frontier = [
        Compiled(
            c.name,
            c.result.report.total_bytes or 0,
            1e3 * c.result.seconds,
            search.fits(c.result),
            c.strategy.policy is None,
        )
        for c in sorted(search.found, key=lambda c: c.result.seconds)
    ]
    if best.strategy.policy is not None:
        search.notes.append(
            "the gradient is noisier than the plain one; jaxcomp.check_gradients measures it"
        )
    result = best.result
    highest = max(result.moments, key=lambda m: _alive(result, m))
    alive = {g: f * result.saved.get(g, 0) for g, f in highest.alive.items()}
    binding = (
        f"the peak is in the {highest.where}: {format_bytes(round(sum(alive.values())))} of saved "
        f"activations, {format_bytes(round(highest.rest))} of all else"
    )
    policy = best.strategy.policy if isinstance(best.strategy.policy, Policy) else None
    parts = tuple(
        Part(group, action, result.saved.get(group, 0), 1e3 * result.seconds_of.get(group, 0.0))
        for group, action in sorted((best.assignment or {}).items())
    )
    total = result.report.total_bytes
    assert total is not None
    return FittedPlan(
        search.target.name,
        search.batch,
        search.budget,
        best.name,
        policy,
        "" if policy is not None else best.strategy.spec,
        best.strategy.micro_batches,
        total,
        1e3 * result.seconds,
        parts,
        tuple(frontier),
        binding,
        tuple(errors),
        notes=tuple(search.notes),
    )


def _alive(result: Probe, moment: Any) -> float:
    saved = (f * result.saved.get(g, 0) for g, f in moment.alive.items())
    return float(moment.rest + sum(saved))


def _does_not_fit(search: _Search) -> DoesNotFitError:
    reached = [
        c for c in search.found if c.result.report.total_bytes is not None and c.result.moments
    ]
    if not reached:
        return DoesNotFitError(f"budget={format_bytes(search.budget)}: nothing could be compiled")
    least = min(reached, key=lambda c: c.result.report.total_bytes or 0)
    report, result = least.result.report, least.result
    highest = max(result.moments, key=lambda m: _alive(result, m))
    saved = sum(f * result.saved.get(g, 0) for g, f in highest.alive.items())
    given = report.argument_bytes or 0
    return DoesNotFitError(
        f"budget={format_bytes(search.budget)}: nothing fits; the least is {least.name} with "
        f"{format_bytes(report.total_bytes or 0)}, of which {format_bytes(given)} are arguments "
        f"(parameters, optimizer state, batch) and at the peak, in the {highest.where}, "
        f"{format_bytes(round(saved))} saved activations and "
        f"{format_bytes(round(max(0, highest.rest - given)))} other temporary memory. A smaller "
        "batch, more micro-batches (accumulate:N), an optimizer with less state or a loss that is "
        f"computed in parts takes less{''.join(f'; {note}' for note in search.notes)}"
    )


def room_of(budget: int | str | None, target: str | None) -> int:
    """The bytes of a budget; by default, what a step may use of the target's memory.

    Raises:
        ValueError: If they are not known, or more than the target has.
    """
    where = resolve(target)
    room = usable_bytes(where, None) if budget is None else bytes_of(budget)
    if room is None:
        raise ValueError(f"budget=None: the memory of target={where.name!r} is not known")
    if where.capacity_bytes is not None and room > where.capacity_bytes:
        raise ValueError(
            f"budget={format_bytes(room)}: {where.name} has {format_bytes(where.capacity_bytes)}"
        )
    return room


def _has_no_statistics(models: Sequence[Any]) -> bool:
    """Whether all models are of Flax NNX and have no batch norm."""
    return all(
        isinstance(model, nnx.Module) and not jax.tree.leaves(nnx.state(model, nnx.BatchStat))
        for model in models
    )


def check(actions: Sequence[Action], bits: Sequence[int], compiles: int) -> None:
    """Raises a ValueError for an argument of `fit` that is not what it should be."""
    if isinstance(actions, str) or not actions or set(actions) - set(ACTIONS):
        raise ValueError(f"actions={actions!r}: expected some of {ACTIONS}")
    if not isinstance(bits, Sequence) or set(bits) - set(BITS):
        raise ValueError(f"bits={bits!r}: expected some of {BITS}")
    if isinstance(compiles, bool) or not isinstance(compiles, int) or compiles < 1:
        raise ValueError(f"compiles={compiles!r}: expected a positive integer")


def _pinned(pin: Mapping[str, str], groups: Groups, bits: Sequence[int]) -> dict[str, str]:
    """The pinned choices by group."""
    known = ["keep", "recompute", *(f"quantize:bits={b}" for b in bits)]
    found: dict[str, str] = {}
    for pattern, choice in pin.items():
        if choice not in known:
            raise ValueError(f"pin[{pattern!r}]={choice!r}: expected one of {known}")
        matched = {
            groups.group_of(path)
            for path in groups.paths
            if re.fullmatch(pattern, path) or re.fullmatch(pattern, f"{path}/")
        }
        if not matched:
            paths = ", ".join(sorted(groups.paths)[:20]) or "none"
            raise ValueError(f"pin[{pattern!r}] matches no module; the modules are: {paths}")
        found |= dict.fromkeys(matched, choice)
    return found
