"""`fit`: a budget of bytes in, a strategy out that was compiled and fits."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, get_args

import jax
from flax import nnx

from jaxcomp.diagnostics._losses import check_data, parameters_of
from jaxcomp.memory._analyze import usable_bytes
from jaxcomp.memory._declared import takes_gradient
from jaxcomp.memory._live_bytes import format_bytes
from jaxcomp.memory._sizes import bytes_of
from jaxcomp.memory._targets import Target, resolve
from jaxcomp.memory._tracing import has_regions
from jaxcomp.memory._words import did_you_mean
from jaxcomp.planning._answer import DoesNotFitError, answer
from jaxcomp.planning._compiled import Compiled
from jaxcomp.planning._fitted import FittedPlan
from jaxcomp.planning._groups import Groups, block_of, coded
from jaxcomp.planning._noise import PARTS, Data
from jaxcomp.planning._plans import Allowed, run
from jaxcomp.planning._probe import trace_scoped
from jaxcomp.planning._problem import Action
from jaxcomp.planning._search import Search
from jaxcomp.planning._strategies import Strategy
from jaxcomp.planning._watched import MakeStep
from jaxcomp.policies._patterns import check_pattern, fits

ACTIONS: tuple[Action, ...] = get_args(Action)
BITS = (8, 4, 3, 2)
_TIMED = 3


def fit(
    make_step: MakeStep,
    *,
    batch: int,
    budget: int | str | None = None,
    allowance: int | str | None = None,
    target: str | None = None,
    actions: Sequence[Action] = ACTIONS,
    bits: Sequence[int] = BITS,
    noise: float | None = None,
    data: Data | None = None,
    biased: bool = False,
    pin: Mapping[str, str] | None = None,
    split_batch_statistics: bool = False,
    compiles: int = 8,
    calibrate: bool = False,
    progress: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    compiled: Callable[[Compiled], Any] | None = None,
) -> FittedPlan:
    """Finds the fastest way to make a training step fit a budget of memory.

    The budget is for all that XLA needs on the target: arguments, outputs and temporary memory. The
    step is compiled as it is, with all values quantized, with its blocks recomputed, and, if that
    may fit, with all but the results of products with weights recomputed. From these an integer
    program chooses what to do with each group of modules, so that the estimated time is least and
    no moment of the step exceeds the budget. Its plan is compiled, the estimate is corrected, and
    the program is solved again. Where the author computes parts of the step again by
    `jax.checkpoint`, the step is also compiled without that, and codes open these parts. For a
    model with its blocks in a list, exact plans that recompute some of the blocks are considered,
    too. Only what was compiled and fits is returned. An
    exact strategy wins where it is estimated to be as fast, but for the error of the estimate
    (11%), and of strategies that differ by less than 2% the one of the least memory.

    Compiled steps are remembered, so that further budgets for the same step take less time. Those
    for absent targets are also kept on disk, as by `jaxcomp.memory.analyze`.

    The time is `memory.MemoryReport.estimated_seconds`. It ranks strategies.

    Args:
        make_step: The step factory, as `compare` takes it.
        batch: The batch size.
        budget: Bytes, or text such as "11GiB". By default, what a step may use of the target's
            memory.
        allowance: What of the budget is left for all but XLA's buffers, such as workspaces of
            libraries: bytes or text. By default 96 MiB of a GPU, the most that was measured, and
            nothing elsewhere.
        target: The target's name, as in `analyze`. By default, the attached device.
        actions: What a plan may do: "keep" values, "quantize" them, "recompute" blocks, "offload"
            values or their codes to the host's memory, or "accumulate" gradients of micro-batches.
            Values are offloaded only where nothing else fits.
        bits: Bits of a quantized element that a plan may use, of 8, 4, 3 and 2. Fewer than 4 are
            used only where a plan without them does not fit.
        noise: The largest standard deviation that codes may add to the gradient, as a part of that
            of SGD, such as 0.1. It needs `data`.
        data: What the noise of codes is measured on: a loss of a model and a batch, the NNX model
            with its parameters, or the pytree of parameters of a function, and a batch, which may
            be smaller than `batch`. The loss is not compressed itself. The gradient is
            taken on the attached device, three times for the codes of each kind of group. Without
            it, the noise is not known.
        biased: Whether batch norms may have 2-bit codes, which bias the gradient. Without them, 3
            bits are the fewest of a batch norm.
        pin: Choices that are given, by a regular expression for paths of modules: "keep",
            "recompute" or "bits=N". `{"head/.*": "keep"}` is for a head and all in it. A
            pin for a part of a group is for the group.
        split_batch_statistics: Whether gradients may be accumulated where a batch norm would then
            see fewer images, or where that is not known, as of a function.
        compiles: The largest number of compilations.
        calibrate: Whether the three steps that are estimated to be the fastest of what fits are run
            on the target, which has to be attached, and the fastest one is chosen.
        progress: Is entered with a strategy's name while it is compiled.
        compiled: Is called with the figures of each strategy that was compiled.

    Returns:
        The plan. Its `strategy` is for a step factory, its `policy` for `compress` and
        `checkpoint`.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If an argument is not what it should be, or the step takes no gradient; or, as
            `DoesNotFitError`, if its arguments alone or all that was compiled do not fit.
        ImportError: If the wheel with the target's compiler is not installed.
        CompileError: If the plain step does not compile.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
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
    check_noise(noise, data)
    if not isinstance(pin, Mapping | None):
        raise TypeError(f"pin={pin!r}: expected a dict from paths to choices")
    where = resolve(target)
    if calibrate and not where.attached:
        raise ValueError(f"calibrate=True: {where.name} is not attached")
    total = room_of(budget, target)
    room = total - allowance_of(allowance, where)
    plain = Strategy.parse("plain")
    plain.check_batch(batch)
    traced, models = trace_scoped(make_step, plain, batch, where)
    if not takes_gradient(traced.jaxpr):
        raise ValueError("make_step: expected a step that takes a gradient")
    groups = Groups.of(models, traced)
    is_model = data is not None and isinstance(data[1], nnx.Module)
    if data is not None and (is_model == groups.of_scopes):
        kind = "the parameters of a function" if groups.of_scopes else "a Flax NNX module"
        raise TypeError(f"data: expected {kind}, as that of make_step")
    if data is not None and is_model and Groups.of([data[1]], traced) != groups:
        raise ValueError("data: expected a model with the modules of that of make_step")
    pinned = _pinned(pin or {}, groups, actions, bits)
    given = sum(leaf.size * leaf.dtype.itemsize for leaf in traced.arguments) // where.devices
    if room < given:
        raise DoesNotFitError(
            f"budget={format_bytes(total)}: the arguments of the step alone (parameters, state and "
            f"batch) take {format_bytes(given)}{_meant(budget, given)}"
        )
    allowed = Allowed(actions, bits, biased, pinned, split_batch_statistics, data)
    most_noise = math.inf if noise is None else noise
    search = Search(
        make_step, batch, where, room, compiles, progress, groups, allowed.admits, most_noise
    )
    search.report = compiled
    try:
        run(search, models, allowed, has_regions(traced.jaxpr))
        if calibrate:
            search.measure(_TIMED)
    except KeyboardInterrupt:
        if search.best() is None:
            raise
        search.notes.append("stopped early: the best that was compiled until then")
    return answer(search, total)


def allowance_of(allowance: int | str | None, target: Target) -> int:
    """Returns the bytes of an allowance; by default, the target's.

    Raises:
        ValueError: If they are no number of bytes.
    """
    if allowance is None:
        return target.allowance_bytes
    return bytes_of("allowance", allowance, least=0)


def room_of(budget: int | str | None, target: str | None) -> int:
    """Returns the bytes of a budget; by default, what a step may use of the target's memory.

    Raises:
        ValueError: If they are not known, or more than the target has.
    """
    where = resolve(target)
    room = usable_bytes(where, None) if budget is None else bytes_of("budget", budget)
    if room is None:
        raise ValueError(
            f"budget=None: the memory of target={where.name!r} is not known; expected a budget, "
            "such as 8GiB"
        )
    if where.capacity_bytes is not None and room > where.capacity_bytes:
        raise ValueError(
            f"budget={format_bytes(room)}: {where.name} has {format_bytes(where.capacity_bytes)}"
        )
    return room


def _meant(budget: int | str | None, given: int) -> str:
    """Returns a question for a budget in GiB that was given as a number of bytes."""
    is_small = isinstance(budget, int) and budget < 2**10 and budget * 2**30 > given
    return f"; did you mean '{budget}GiB'?" if is_small else ""


def check(actions: Sequence[Action], bits: Sequence[int], compiles: int) -> None:
    """Raises a TypeError or ValueError for an argument of `fit` that is not what it should be."""
    if isinstance(actions, str) or not actions or set(actions) - set(ACTIONS):
        near = "" if isinstance(actions, str) else _near(actions)
        raise ValueError(f"actions={actions!r}: expected some of {ACTIONS}{near}")
    if not isinstance(bits, Sequence) or not all(type(number) is int for number in bits):
        raise TypeError(f"bits={bits!r}: expected a sequence of integers")
    if set(bits) - set(BITS) or ("quantize" in actions and not bits):
        raise ValueError(f"bits={bits!r}: expected some of {BITS}")
    if isinstance(compiles, bool) or not isinstance(compiles, int) or compiles < 1:
        raise ValueError(f"compiles={compiles!r}: expected a positive integer")


def _near(actions: Sequence[str]) -> str:
    return next((did_you_mean(a, ACTIONS) for a in actions if a not in ACTIONS), "")


def check_noise(noise: float | None, data: Data | None) -> None:
    """Raises a TypeError or ValueError for a limit of noise, or data, that is none."""
    if noise is not None and data is None:
        raise ValueError(f"noise={noise!r}: expected data=(loss, model, batch) to measure it on")
    if noise is not None and not (isinstance(noise, int | float) and 0 < noise < math.inf):
        raise ValueError(f"noise={noise!r}: expected a positive number")
    if data is None:
        return
    if not isinstance(data, tuple) or len(data) != 3:
        raise TypeError(f"data={type(data).__name__}: expected a tuple of 3: loss, model, batch")
    loss, model, batch = data
    check_data(loss, batch, PARTS)
    leaves = jax.tree.leaves(parameters_of(model))
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        raise TypeError("data: expected a model with its parameters, not of nnx.eval_shape")


def _pinned(
    pin: Mapping[str, str], groups: Groups, actions: Sequence[Action], bits: Sequence[int]
) -> dict[str, str]:
    """Returns the pinned choices by group."""
    known = ["keep", *(a for a in actions if a == "recompute")]
    known += [coded(b) for b in bits] if "quantize" in actions else []
    found: dict[str, str] = {}
    for pattern, choice in pin.items():
        if choice not in known:
            raise ValueError(f"pin[{pattern!r}]={choice!r}: expected one of {known}")
        for group in _matched(pattern, groups):
            if found.setdefault(group, choice) != choice:
                raise ValueError(
                    f"pin[{pattern!r}]={choice!r}: {group} is one group, and has {found[group]!r} "
                    "by another pattern"
                )
            if choice == "recompute" and not (groups.recomputes and block_of(group)):
                raise ValueError(
                    f"pin[{pattern!r}]={choice!r}: {group} is not in a list of blocks, or the "
                    "model is a function or has layers of jaxcomp.nn"
                )
    return found


def _matched(pattern: str, groups: Groups) -> set[str]:
    """Returns the groups with a module that a pattern matches."""
    check_pattern("pin", pattern)
    matched = {
        groups.group_of(path)
        for path in groups.paths
        if fits(pattern, path) or fits(pattern, f"{path}/")
    }
    if not matched:
        paths = ", ".join(sorted(groups.paths)[:20]) or "none"
        raise ValueError(f"pin[{pattern!r}] matches no module; the modules are: {paths}")
    return matched
