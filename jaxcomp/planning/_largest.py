"""`largest_batch`: the largest batch that a strategy can make fit a budget."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from jaxcomp.memory._batch import max_batch
from jaxcomp.memory._compiling import CompileError
from jaxcomp.memory._targets import resolve
from jaxcomp.planning._fit import ACTIONS, BITS, allowance_of, check, room_of
from jaxcomp.planning._groups import coded, rules_of
from jaxcomp.planning._problem import Action
from jaxcomp.planning._strategies import Strategy
from jaxcomp.planning._watched import MakeStep
from jaxcomp.policies._policy import Policy


def largest_batch(
    make_step: MakeStep,
    *,
    budget: int | str | None = None,
    allowance: int | str | None = None,
    target: str | None = None,
    actions: Sequence[Action] = ACTIONS,
    bits: Sequence[int] = BITS,
    biased: bool = False,
    multiple: int = 8,
    progress: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> int:
    """Finds the largest batch that a budget of memory holds, without micro-batches.

    The step is compiled for several batch sizes by each of the strategies that take the least
    memory: recomputed blocks, and all values in the fewest bits. `fit` then finds the fastest plan
    for the batch.

    Args:
        make_step: The step factory, as `compare` takes it.
        budget: As `fit` takes it.
        allowance: As `fit` takes it.
        target: As `fit` takes it.
        actions: As `fit` takes them.
        bits: As `fit` takes them.
        biased: As `fit` takes it.
        multiple: What the batch is a multiple of.
        progress: Is entered with a strategy's name while it is compiled.

    Returns:
        The batch size; 0 if a batch of `multiple` does not fit.

    Raises:
        TypeError: As `fit`.
        ValueError: As `fit`, or if `multiple` is not positive, or the memory of the step does not
            depend on the batch.
        ImportError: If the wheel with the target's compiler is not installed.
        CompileError: If the plain step does not compile.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> def make_step(transform, batch):
        ...     model = transform(nnx.eval_shape(lambda: nnx.Linear(64, 64, rngs=nnx.Rngs(0))))
        ...     gradient = nnx.grad(lambda model, x: jnp.sin(model(x)).sum())
        ...     return gradient, (model, jax.ShapeDtypeStruct((batch, 64), jnp.float32))
        >>> given = {"budget": "1MiB", "target": "cpu", "actions": ("keep",), "multiple": 64}
        >>> 1024 < largest_batch(make_step, **given) < 2048
        True
    """
    check(actions, bits, compiles=1)
    room = room_of(budget, target) - allowance_of(allowance, resolve(target))
    strategies = [Strategy.parse("plain")]
    if "quantize" in actions and bits:
        choice = coded(min(bits))
        strategies.append(Strategy(choice, policy=Policy(rules_of(choice, biased))))
    if "recompute" in actions:
        strategies.append(Strategy.parse("remat"))
    found = []
    for strategy in strategies:
        with progress(f"{strategy.spec}, several batches"):
            try:
                make = partial(make_step, strategy)
                found.append(max_batch(make, target, multiple=multiple, capacity=room))
            except (ValueError, CompileError):
                if strategy.is_plain:
                    raise
    return max(found)
