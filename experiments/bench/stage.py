"""Compares the memory of four ResNet-50 bottleneck blocks by several strategies.

    python -m experiments.bench.stage --target h100 --out experiments/results/stage-h100

The blocks are those of the first stage (56x56x256), so the steps compile fast. A step is a forward
and backward pass, with the gradient of the input, and an SGD update.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import typer
from flax import nnx
from jax.typing import DTypeLike

from experiments.bench.memory import STRATEGIES, tabulate
from experiments.common.options import Batch, Out, Strategies, Target, usage_errors
from jaxcomp._core.modules import State, split_model
from jaxcomp.memory import compiler_options
from jaxcomp.models.resnet import Bottleneck, Features, Layers
from jaxcomp.ops import value
from jaxcomp.planning import MakeStep, Strategy

BLOCKS = 4


class Stage(nnx.Module):
    """Bottleneck blocks of one shape."""

    def __init__(self, blocks: int, width: int, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        layers = Layers(dtype, rngs)
        self.blocks = nnx.List(
            Bottleneck(layers, 4 * width, width, 1, "projection") for _ in range(blocks)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the last block's output."""
        features: Features = x
        for block in self.blocks:
            features = block(features)
        return value(features)


def step_factory(
    blocks: int = BLOCKS, size: int = 56, width: int = 64, dtype: DTypeLike = jnp.bfloat16
) -> MakeStep:
    """Makes the step factory of a stage of `size` x `size` x `4 * width`."""

    def make_step(transform: Strategy, batch: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        stage = transform(nnx.eval_shape(lambda: Stage(blocks, width, dtype, nnx.Rngs(0))))
        graphdef, params, statistics = split_model(stage)

        def loss(params: State, statistics: State, x: jax.Array) -> tuple[jax.Array, State]:
            stage = nnx.merge(graphdef, params, statistics, copy=True)
            return jnp.mean(stage(x).astype(jnp.float32) ** 2), split_model(stage)[2]

        @partial(jax.jit, donate_argnums=(0, 1), compiler_options=compiler_options())
        def step(params: State, statistics: State, x: jax.Array) -> tuple[State, State, jax.Array]:
            (grads, dx), statistics = jax.grad(loss, (0, 2), has_aux=True)(params, statistics, x)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), statistics, dx

        x = jax.ShapeDtypeStruct((batch, size, size, 4 * width), dtype)
        return step, (params, statistics, x)

    return make_step


@usage_errors()
def main(out: Out, strategy: Strategies = None, batch: Batch = 128, target: Target = None) -> None:
    """Compile the stage by several strategies; write memory.json and memory.md."""
    strategies = strategy or [name for name in STRATEGIES if not name.startswith("accumulate")]
    model = f"{BLOCKS} bottleneck blocks, 56x56x256, bfloat16"
    tabulate(step_factory(), strategies, model, batch, target, out)


if __name__ == "__main__":
    typer.run(main)
