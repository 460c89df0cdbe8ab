"""`Scenario`: a loss as its author wrote it, and its training step by a strategy."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import optax

import jaxcomp as jc
from jaxcomp.planning import Strategy

Around = Callable[[Callable[..., Any]], Callable[..., Any]]
"""What is put around each block, such as `jax.checkpoint`."""


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A loss and its arguments.

    Attributes:
        loss: Of an `Around`, the trained parameters, and the other arguments.
        shapes: The shapes of the trained parameters and of the other arguments, of a size.
        batch: The size: what the scenario calls a batch.
        optimizer: Updates the trained parameters.
        remat: What an author puts around blocks who rematerialises them.
    """

    loss: Callable[..., jax.Array]
    shapes: Callable[[int], tuple[Any, ...]]
    batch: int
    optimizer: optax.GradientTransformation
    remat: Callable[..., Any] = jax.checkpoint

    def make_loss(self, strategy: Strategy) -> Callable[..., jax.Array]:
        """Returns the loss by a strategy, of the trained parameters and the other arguments.

        Raises:
            ValueError: If the strategy divides the batch.
        """
        if strategy.micro_batches > 1:
            raise ValueError(f"strategy={strategy.spec}: a scenario's batch is not divided")
        remat = functools.partial(self.remat, policy=strategy.remat_policy)
        loss = functools.partial(self.loss, remat if strategy.remat else lambda block: block)
        if strategy.block_codec is not None:
            return jc.checkpoint(loss, jc.recipes.boundary(strategy.block_codec))
        return loss if strategy.policy is None else jc.checkpoint(loss, strategy.policy)

    def make_step(
        self, strategy: Strategy, batch: int
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Makes the jitted step, and the shapes of its arguments."""
        loss = self.make_loss(strategy)
        trained, *rest = self.shapes(batch)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(trained: Any, state: Any, *rest: Any) -> tuple[Any, Any, jax.Array]:
            value, gradient = jax.value_and_grad(loss)(trained, *rest)
            updates, state = self.optimizer.update(gradient, state, trained)
            return optax.apply_updates(trained, updates), state, value

        return step, (trained, jax.eval_shape(self.optimizer.init, trained), *rest)
