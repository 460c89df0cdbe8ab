"""A step factory of a training step and its arguments, for steps that have none."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxcomp.memory._argument_names import is_object
from jaxcomp.planning._strategies import Strategy
from jaxcomp.planning._watched import MakeStep


def factory_of(step: Callable[..., Any], arguments: tuple[Any, ...]) -> MakeStep:
    """Returns a step factory that applies a strategy to the models among the arguments.

    Models are Flax NNX modules, also in an `nnx.ModelAndOptimizer` or in a pytree, and the
    `apply_fn` of a Linen `TrainState`. The factory changes copies of them, which hold shapes in
    place of arrays. A step without models has the plain strategy alone.

    Args:
        step: The step, which may be jitted.
        arguments: Its arguments.

    Returns:
        The factory. It raises a ValueError for a strategy that needs more than the models.
    """

    def make_step(transform: Strategy, batch: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if transform.micro_batches > 1:
            raise ValueError(
                "micro-batches need a step factory, which splits the batch: "
                "jaxcomp.compare(make_step, rows, batch=...)"
            )
        made = _copied(arguments)
        models = _models_in(made)
        for model in models:
            transform(model)
        has_function = [_has_function(argument) for argument in made]
        if not models and not any(has_function) and (transform.remat or transform.policy):
            raise ValueError(
                "arguments: expected a Flax NNX model or a Linen TrainState among them, to apply a "
                "strategy to; for other steps pass a step factory: "
                "jaxcomp.compare(make_step, rows, batch=...)"
            )
        if any(has_function) and transform.remat:
            raise ValueError(
                f"strategy={transform.spec!r}: the blocks of a function are not known; pass a step "
                "factory, which applies jax.checkpoint to them"
            )
        return step, tuple(
            argument.replace(apply_fn=transform(argument.apply_fn)) if is_state else argument
            for argument, is_state in zip(made, has_function, strict=True)
        )

    return make_step


def _copied(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns a copy with shapes in place of arrays; modules that are shared stay shared."""
    graphdef, state = nnx.split(arguments)
    copy: tuple[Any, ...] = nnx.merge(graphdef, jax.tree.map(_shape, state))
    return copy


def _shape(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array | np.ndarray):
        return leaf
    sharding = getattr(leaf, "sharding", None)
    placed = sharding if isinstance(sharding, jax.sharding.NamedSharding) else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed)


def _models_in(arguments: Any) -> list[nnx.Module]:
    """Returns the outermost modules of arguments, each once."""
    found: list[nnx.Module] = []
    for leaf in jax.tree.leaves(arguments, is_leaf=is_object):
        inside = vars(leaf).values() if is_object(leaf) and not isinstance(leaf, nnx.Module) else ()
        found += [value for value in (leaf, *inside) if isinstance(value, nnx.Module)]
    return list({id(module): module for module in found}.values())


def _has_function(argument: Any) -> bool:
    """Returns whether an argument is a training state of Linen."""
    is_state = dataclasses.is_dataclass(argument) and hasattr(argument, "replace")
    return is_state and callable(getattr(argument, "apply_fn", None))
