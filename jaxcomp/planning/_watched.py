"""A step traced by a factory that is watched: what it did with the strategy that it was given."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from flax import nnx

from jaxcomp.memory._targets import Target
from jaxcomp.memory._tracing import TracedStep, trace
from jaxcomp.planning._strategies import Strategy

MakeStep = Callable[[Strategy, int], tuple[Callable[..., Any], tuple[Any, ...]]]
M = TypeVar("M", bound=nnx.Module | Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class _Watched(Strategy):
    """A strategy that knows the models that it was applied to, and what was asked of it."""

    apply: Callable[[Any], Any] | None = dataclasses.field(kw_only=True)
    models: list[Any] = dataclasses.field(default_factory=list)
    read: set[str] = dataclasses.field(default_factory=set)

    def __getattribute__(self, name: str) -> Any:
        if name in ("spec", "policy", "remat", "remat_policy", "micro_batches"):
            self.read.add(name)
        return super().__getattribute__(name)

    def __call__(self, model: M) -> M:
        self.models.append(model)
        applied: M = (self.apply or self.unwatched())(model)
        return applied

    def unwatched(self) -> Strategy:
        """Returns the same strategy, which the factory may have replaced."""
        names = [f.name for f in dataclasses.fields(Strategy)]
        return Strategy(**{name: object.__getattribute__(self, name) for name in names})

    def check(self, asked: Strategy) -> None:
        """Raises a ValueError if a step factory did not do what the strategy asks for."""

        def has_read(*names: str) -> bool:
            return not self.read.isdisjoint((*names, "spec"))

        if not self.models and not has_read("policy" if asked.policy is not None else "remat"):
            raise ValueError("make_step is expected to call transform(model)")
        of_nnx = any(isinstance(model, nnx.Module) for model in self.models)
        if asked.remat and not of_nnx and not has_read("remat", "remat_policy"):
            raise ValueError(
                "make_step is expected to apply jax.checkpoint to its blocks where transform.remat "
                "is true: it called transform with no Flax NNX model"
            )
        if asked.first_blocks is not None and not of_nnx:
            raise ValueError(
                f"strategy={asked.spec!r}: expected make_step to call transform with a Flax NNX "
                "model, of which some blocks can be recomputed"
            )
        if asked.micro_batches > 1 and not has_read("micro_batches"):
            raise ValueError(
                "make_step is expected to split the batch into transform.micro_batches parts; it "
                "did not ask for them"
            )


def _made(make_step: MakeStep, strategy: Strategy, batch: int) -> tuple[Any, tuple[Any, ...]]:
    """Returns the step and its arguments.

    Raises:
        TypeError: If the factory takes or returns something else.
    """
    if not callable(make_step):
        raise TypeError(f"make_step={make_step!r}: expected a function of (transform, batch)")
    try:
        signature = inspect.signature(make_step)
        signature.bind(strategy, batch)
    except ValueError:  # it has no signature
        pass
    except TypeError:
        raise TypeError(
            f"make_step: expected a function of (transform, batch), this one takes {signature}"
        ) from None
    made: Any = make_step(strategy, batch)
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[1], tuple | list):
        got = f"{len(made)} values" if isinstance(made, tuple) else f"{type(made).__name__}"
        raise TypeError(
            f"make_step returned {got}, expected (step, arguments), as (step, (model, batch)): put "
            "all arguments of the step into one tuple"
        )
    return made[0], tuple(made[1])


def trace_step(
    make_step: MakeStep,
    strategy: Strategy,
    batch: int,
    target: Target,
    apply: Callable[[Any], Any] | None = None,
) -> tuple[TracedStep, list[Any]]:
    """Traces the step that a factory makes with a strategy.

    Args:
        make_step: The factory, as `compare` takes it.
        strategy: What it is given.
        batch: The batch size.
        target: What the step is for.
        apply: What is done with the model; by default, what the strategy does.

    Returns:
        The step, and the models that the factory applied the strategy to.

    Raises:
        TypeError: If the factory takes or returns something else.
        ValueError: If the factory does not do what the strategy asks for.
    """
    copied = {f.name: getattr(strategy, f.name) for f in dataclasses.fields(strategy)}
    watched = _Watched(**copied, apply=apply)
    step, arguments = _made(make_step, watched, batch)
    traced = trace(step, *arguments, target=target)
    watched.check(strategy)  # the step may ask for its micro-batches when it is traced
    return traced, watched.models
