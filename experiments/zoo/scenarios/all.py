"""The scenarios by name."""

from experiments.zoo.scenarios import (
    clip,
    contrastive,
    pair_stack,
    policy_gradient,
    potential,
    robot_policy,
    weather,
)
from experiments.zoo.scenarios.scenario import Scenario

SCENARIOS: dict[str, Scenario] = {
    "pair_stack": pair_stack.SCENARIO,
    "robot_policy": robot_policy.SCENARIO,
    "weather": weather.ONE_STEP,
    "weather_four_steps": weather.FOUR_STEPS,
    "policy_gradient": policy_gradient.ALL_LOGITS,
    "policy_gradient_chunked": policy_gradient.CHUNKED,
    "potential": potential.SCENARIO,
    "contrastive": contrastive.SCENARIO,
    "clip": clip.SCENARIO,
}
