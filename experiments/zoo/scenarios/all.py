"""The scenarios by name."""

from experiments.zoo.scenarios import pair_stack
from experiments.zoo.scenarios.scenario import Scenario

SCENARIOS: dict[str, Scenario] = {"pair_stack": pair_stack.SCENARIO}
