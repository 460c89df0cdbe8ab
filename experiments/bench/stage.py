"""What XLA makes of four ResNet-50 bottleneck blocks, several ways: a quick look at a hot path.

    python -m experiments.bench.stage --target h100 --out experiments/results/stage-h100

The blocks are the first stage's (56x56x256); the step is forward, backward and SGD, and the
gradient reaches the input too.
"""

from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import typer
from flax import nnx

from experiments.bench.memory import WAYS, tabulate
from experiments.step import State, split_model
from experiments.ways import Way
from jaxcomp import memory
from jaxcomp.models.resnet import Bottleneck, Layers, Projection
from jaxcomp.rules import apply

BLOCKS = 4


class Stage(nnx.Module):
    """Bottleneck blocks of one width."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        layers = Layers(jnp.bfloat16, rngs)
        self.blocks = nnx.List(Bottleneck(layers, 256, 64, 1, Projection) for _ in range(BLOCKS))


def analyze(way: str, batch: int, target: str | None) -> memory.MemoryReport:
    """Compiles the stage's step for the target."""
    parsed = Way.parse(way)

    def create() -> Stage:
        stage = Stage(nnx.Rngs(0))
        apply(stage, parsed.rules)
        return stage

    graphdef, params, statistics = split_model(nnx.eval_shape(create))

    def loss(params: State, statistics: State, x: jax.Array) -> tuple[jax.Array, State]:
        stage = nnx.merge(graphdef, params, statistics, copy=True)
        for block in stage.blocks:
            x = nnx.remat(Bottleneck.__call__)(block, x) if parsed.remat else block(x)
        return jnp.mean(x.astype(jnp.float32) ** 2), split_model(stage)[2]

    def step(params: State, statistics: State, x: jax.Array) -> tuple[State, State, jax.Array]:
        (grads, dx), statistics = jax.grad(loss, (0, 2), has_aux=True)(params, statistics, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), statistics, dx

    x = jax.ShapeDtypeStruct((batch, 56, 56, 256), jnp.bfloat16)
    return memory.analyze(step, params, statistics, x, target=target, donate_argnums=(0, 1))


def main(
    out: Annotated[Path, typer.Option(help="Directory of the results.")],
    way: Annotated[
        list[str] | None, typer.Option(help="A row; repeat for more, plain first. Default: five.")
    ] = None,
    batch: int = 128,
    target: Annotated[
        str | None, typer.Option(help="As jaxcomp.memory.targets; default: the attached device.")
    ] = None,
) -> None:
    """Compiles the stage several ways; writes memory.json and memory.md."""
    ways = way or [spec for spec in WAYS if not spec.startswith("accumulate")]
    settings = {"model": f"{BLOCKS} bottleneck blocks", "batch": batch, "dtype": "bfloat16"}
    try:
        tabulate(ways, lambda spec: analyze(spec, batch, target), settings, out)
    except (ValueError, ImportError) as error:
        raise typer.BadParameter(str(error)) from error


if __name__ == "__main__":
    typer.run(main)
