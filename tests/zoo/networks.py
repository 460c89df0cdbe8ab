"""What a network of the zoo is: one training step that can be compressed."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxcomp as jc
from tests.helpers import normal


@dataclasses.dataclass(frozen=True)
class Network:
    """A step, its parameters, and arrays that are not differentiated.

    `step(policy)` is a function of the parameters, these arrays and a seed. It returns the loss and
    the state after it. A policy of None means stock.
    """

    step: Callable[[Any], Callable[[Any, Any, Any], Any]]
    params: Any
    arrays: Any


def moved_from_zero(params):
    """Parameters without the zeros that initializers like: behind a zero no gradient shows."""
    leaves, tree = jax.tree.flatten(params)
    noise = [0.1 * normal(leaf.shape, leaf.dtype, seed=i) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(tree, [jnp.add(*pair) for pair in zip(leaves, noise, strict=True)])


def of_function(loss, params, *arrays):
    """A network of any library: `loss(params, *arrays)` returns the loss and the new state."""

    def step(policy):
        def run(params, arrays, seed):
            ours = loss if policy is None else jc.checkpoint(loss, policy, seed=seed)
            return ours(params, *arrays)

        return run

    return Network(step, moved_from_zero(params), arrays)


def of_nnx(model, loss, *batch):
    """A Flax NNX model; `loss(model, *batch)` returns the loss."""
    _, params, state = nnx.split(model, nnx.Param, ...)

    def step(policy):
        ours = nnx.clone(model)
        if policy is not None:
            ours = jc.compress(ours, policy)
        graphdef = nnx.graphdef(ours)

        def run(params, arrays, _):
            state, batch = arrays
            ours = nnx.merge(graphdef, params, state, copy=True)
            value = loss(ours, *batch)
            return value, nnx.state(ours, nnx.Not(nnx.Param))

        return run

    return Network(step, moved_from_zero(params), (state, batch))
