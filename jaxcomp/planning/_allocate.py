"""Bits for each part of a model, so that the codes add the least noise to the gradient."""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.nnx import filterlib
from scipy import optimize

from jaxcomp.diagnostics._losses import Loss, check_data, of_parameters, parameters_of
from jaxcomp.memory._targets import resolve
from jaxcomp.memory._tracing import TracedStep
from jaxcomp.planning._groups import Groups, coded, in_blocks, policy_of
from jaxcomp.planning._noise import PARTS, Noise, measure, meter
from jaxcomp.planning._probe import declared_bytes, trace_scoped
from jaxcomp.planning._strategies import Strategy
from jaxcomp.policies._policy import Policy

WIDTHS = (2, 3, 4, 5, 6, 8)
_MEASURED = 4  # bits, or the next of those that are allowed
_ROUNDING = 1e-9
_WORTH = 0.9  # of the variance of equal bits: more is within the error of what is measured


def allocate(
    loss: Loss,
    model: Any,
    batch: Any,
    bits: float = 4,
    *,
    widths: Sequence[int] = WIDTHS,
    biased: bool = False,
    wrt: filterlib.Filter = nnx.Param,
    progress: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> Policy:
    """Chooses the bits of each part of a model so that the gradient has the least noise.

    The codes take no more bytes than those of the recipe `automatic` with `bits` everywhere. The
    parts are those of `fit`: the modules of a block, or a whole block with a batch norm. The noise
    of each part is measured by gradients in which only that part is coded, so the gradient is
    compiled once for each part. The noise of other widths follows from the step between two levels.
    An integer program then chooses the widths. Their noise is measured, too: unless it has at most
    nine tenths of the variance of equal bits, all parts get equal bits.

    The noise of a part changes in training, most of all in the first steps. Allocate after some
    training, or again from time to time.

    Args:
        loss: `loss(model, batch)` returns a floating-point scalar, in training.
        model: A Flax NNX module that is not compressed, which is not changed, or a pytree of
            parameters, such as those of a Linen module.
        batch: Any pytree of arrays, axis 0 the examples, whose number is a multiple of 4. The exact
            gradient is computed, too, so where the plain step does not fit, take a part of a batch.
        bits: Bits of an element, from the least to the largest of `widths`. Between two of them the
            bytes are interpolated.
        widths: Bits that a part may have.
        biased: Whether batch norms may have 2-bit codes, which are biased. Otherwise they have 3
            bits where others have 2.
        wrt: Selects the variables of a module that the gradient is taken by, as in `nnx.grad`, such
            as `nnx.LoRAParam`.
        progress: Is entered with what is measured.

    Returns:
        A policy with a rule for each part, as `compress` and `checkpoint` take it.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If `bits` or `widths` is out of range, nothing in the model is large enough to
            be coded, or the gradients of the examples do not vary.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import jaxcomp as jc
        >>> model = nnx.Sequential(*(nnx.Linear(64, 64, rngs=nnx.Rngs(k)) for k in range(3)))
        >>> x = jax.random.normal(jax.random.key(0), (512, 64))
        >>> policy = jc.planning.allocate(lambda m, x: (m(x) ** 2).mean(), model, x, bits=4)
        >>> compressed = jc.compress(model, policy)
    """
    _check(bits, widths)
    check_data(loss, batch, PARTS)

    def traced(strategy: Strategy) -> tuple[TracedStep, list[Any]]:
        make_step = functools.partial(_gradient, loss, model, batch, wrt)
        return trace_scoped(make_step, strategy, len(jax.tree.leaves(batch)[0]), resolve(None))

    plain, models = traced(Strategy.parse("plain"))
    groups = Groups.of(models, plain)
    names = sorted(declared_bytes(plain, groups), key=in_blocks)

    def nbytes(choices: Mapping[str, str]) -> dict[str, int]:
        return declared_bytes(traced(Strategy.of(policy_of(choices, biased)))[0], groups)

    def everywhere(width: int) -> dict[str, str]:
        return dict.fromkeys(names, coded(width))

    declared = {width: nbytes(everywhere(width)) for width in sorted(widths)}
    least, *_, most = declared.values()
    names = sorted({*names, *most}, key=in_blocks)
    changed = [name for name in names if least.get(name) != most.get(name)]
    if not changed:
        raise ValueError("model: nothing in it is large enough to be coded; expected larger values")
    middle = min(widths, key=lambda width: abs(width - _MEASURED))
    measured = {middle, *({2} & {*widths} if biased else ())}
    variance = meter((loss, model, batch), biased, 1.0, progress, wrt)
    noise = measure(variance, [[name] for name in changed], measured, progress)
    uniform = everywhere(max(width for width in widths if width <= bits))
    totals = [sum(found.values()) for found in declared.values()]
    budget = float(np.interp(bits, list(declared), totals))
    others = sum(n for name, n in declared[middle].items() if name not in changed)
    chosen = uniform | _least_noise(changed, declared, noise, budget - others)
    with progress("noise of all parts together"):
        is_better = variance(chosen) < _WORTH * variance(uniform)
    fits = sum(nbytes(chosen).values()) <= budget
    return policy_of(chosen if is_better and fits else uniform, biased)


def _check(bits: float, widths: Sequence[int]) -> None:
    """Raises a ValueError for widths that no code has, or bits that are not among them."""
    if not {*widths} <= {*WIDTHS} or len({*widths}) < 2:
        raise ValueError(f"widths={widths!r}: expected at least two of {WIDTHS}")
    if not isinstance(bits, int | float):
        raise TypeError(f"bits={bits!r}: expected a number")
    if not min(widths) <= bits <= max(widths):
        raise ValueError(f"bits={bits!r}: expected from {min(widths)} to {max(widths)} (widths)")


def _gradient(
    loss: Loss, model: Any, batch: Any, wrt: filterlib.Filter, transform: Strategy, size: int
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the gradient that saves as a strategy says, and its arguments; a step factory."""
    if isinstance(model, nnx.Module):
        of = of_parameters(loss, transform(nnx.clone(model)), wrt=wrt)
    else:
        of = transform(of_parameters(loss, model))
    return jax.grad(of), (parameters_of(model, wrt), batch)


def _least_noise(
    names: Sequence[str], declared: Mapping[int, Mapping[str, int]], noise: Noise, budget: float
) -> dict[str, str]:
    """Returns the choice of each part with the least variance whose codes fit the budget.

    Args:
        names: The parts.
        declared: The bytes of each part by width.
        noise: The variance of each part by width.
        budget: The most bytes of all parts.
    """
    widths = list(declared)
    variance = np.array([[noise.of(name, coded(width)) for width in widths] for name in names])
    nbytes = np.array([[declared[width].get(name, 0) for width in widths] for name in names])
    one_each = np.kron(np.eye(len(names)), np.ones(len(widths)))
    found = optimize.milp(
        variance.ravel() / variance.max(),
        integrality=np.ones(variance.size),
        bounds=optimize.Bounds(0, 1),
        constraints=[
            optimize.LinearConstraint(one_each, 1, 1),
            optimize.LinearConstraint(nbytes.ravel() / budget, ub=1 + _ROUNDING),
        ],
    )
    chosen = found.x.reshape(variance.shape).argmax(1)
    return {name: coded(widths[i]) for name, i in zip(names, chosen, strict=True)}
