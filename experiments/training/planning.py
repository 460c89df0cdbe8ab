"""`Planner`: plans the bits of quantized layers between the steps of a training run."""

from typing import Any

import jax
from flax import nnx

from experiments.data.datasets import Dataset
from experiments.training.config import TrainConfig
from experiments.training.run import Run, cross_entropy, of_model
from jaxcomp import Policy, Quantize
from jaxcomp.diagnostics import BitPlanner
from jaxcomp.models import training
from jaxcomp.planning import Strategy


def quantized_bits(strategy: str) -> list[int]:
    """Returns the bits of each rule that quantizes; empty if bits cannot be planned."""
    policy = Strategy.parse(strategy).policy
    rules = policy.rules if isinstance(policy, Policy) else ()
    return [rule.action.bits for rule in rules if isinstance(rule.action, Quantize)]


class Planner:
    """Plans the bits of a run, if its configuration has `plan_steps`."""

    def __init__(
        self,
        config: TrainConfig,
        dataset: Dataset,
        plans: dict[str, dict[str, list[int]]],
    ) -> None:
        """Continues from `plans`, a record by step, to which each plan is added.

        Raises:
            ValueError: If the configuration has `plan_steps`, and the strategy does not quantize or
                there are several processes.
        """
        self.config, self.dataset, self.plans = config, dataset, plans
        bits = quantized_bits(config.strategy)
        if config.plan_steps is not None and not bits:
            raise ValueError(
                f"plan_steps={config.plan_steps}: expected a strategy that quantizes, "
                f"not {config.strategy}"
            )
        if config.plan_steps is not None and jax.process_count() > 1:
            raise ValueError(f"plan_steps={config.plan_steps}: expected a single process")
        self.planner = BitPlanner(
            cross_entropy, bits=max(bits, default=2), every=config.plan_steps or 1
        )
        self.planner.taken = {int(step): plan for step, plan in plans.items()}

    def restored(self, run: Run) -> Run:
        """Returns the run with the bits of the last plan."""
        if not self.plans:
            return run
        self.planner.restore(run.model)
        return of_model(run.model, run.state, self.config, self.dataset)

    def planned(self, run: Run, state: training.TrainState, step: int, batch: Any) -> Run:
        """Returns the run, with new bits if a plan is due and better than the present bits."""
        if self.config.plan_steps is None or step % self.config.plan_steps:
            return run
        model = run.model
        model.train()
        nnx.update(model, state.params, state.model_state)
        if not self.planner.update(model, batch, step):
            return run
        self.plans[str(step)] = self.planner.taken[step]
        return of_model(model, state, self.config, self.dataset)
