"""Measures the memory that one block adds to a step: `jc.checkpoint`, plain JAX and remat.

    python -m experiments.bench.checkpoint --target h100 --out experiments/results/checkpoint-h100

The blocks are plain JAX functions: an MLP with layer norm and GELU, a convolution with batch norm
and ReLU, and attention with layer norm. A stack of `FEWER` blocks and one of `MORE` blocks are
compiled. The difference of XLA's temporary memory, per block, is the memory that a block adds.
`each` checkpoints every block and encodes its input. `whole` checkpoints the stack.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import typer
from jax import lax
from rich.progress import track

import jaxcomp as jc
from experiments.common.options import Out, Target, usage_errors
from experiments.common.record import describe_environment, write_json, write_table
from jaxcomp.memory import analyze

FEWER, MORE = 3, 6
TOKENS, WIDTH, HEADS = (64, 256), 512, 8
MAP = (64, 56, 56, 128)

Block = Callable[[jax.Array, Any], jax.Array]


def _normalized(x: jax.Array, axes: tuple[int, ...], weights: Any) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean = wide.mean(axes, keepdims=True)
    variance = jnp.square(wide - mean).mean(axes, keepdims=True)
    normal = (wide - mean) * lax.rsqrt(variance + 1e-5)
    return (normal * weights["scale"] + weights["bias"]).astype(x.dtype)


def mlp(x: jax.Array, weights: Any) -> jax.Array:
    """`x + gelu(layer_norm(x) @ up) @ down`."""
    h = _normalized(x, (-1,), weights)
    return x + jax.nn.gelu(h @ weights["up"]) @ weights["down"]


def conv(x: jax.Array, weights: Any) -> jax.Array:
    """`relu(batch_norm(convolution(x)))`."""
    dims = ("NHWC", "HWIO", "NHWC")
    h = lax.conv_general_dilated(x, weights["kernel"], (1, 1), "SAME", dimension_numbers=dims)
    return jax.nn.relu(_normalized(h, (0, 1, 2), weights))


def attention(x: jax.Array, weights: Any) -> jax.Array:
    """`x + attention(layer_norm(x))`."""
    h = _normalized(x, (-1,), weights)
    batch, length, width = h.shape
    q, k, v = ((h @ weights[name]).reshape(batch, length, HEADS, -1) for name in "qkv")
    scores = jnp.einsum("nthd,nshd->nhts", q, k) / (width // HEADS) ** 0.5
    shares = jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype)
    mixed = jnp.einsum("nhts,nshd->nthd", shares, v).reshape(h.shape)
    return x + mixed @ weights["out"]


Shapes = dict[str, tuple[int, ...]]
_TOKEN_NORM: Shapes = {"scale": (1, 1, WIDTH), "bias": (1, 1, WIDTH)}
_MAP_NORM: Shapes = {"scale": (1, 1, 1, MAP[-1]), "bias": (1, 1, 1, MAP[-1])}
BLOCKS: dict[str, tuple[Block, tuple[int, ...], Shapes]] = {
    "mlp": (
        mlp,
        (*TOKENS, WIDTH),
        _TOKEN_NORM | {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)},
    ),
    "conv": (conv, MAP, _MAP_NORM | {"kernel": (3, 3, MAP[-1], MAP[-1])}),
    "attention": (
        attention,
        (*TOKENS, WIDTH),
        _TOKEN_NORM | dict.fromkeys(("q", "k", "v", "out"), (WIDTH, WIDTH)),
    ),
}

CODEC = jc.Quantize(bits=4)
STRATEGIES: dict[str, tuple[Callable[[Block], Block], Callable[[Any], Any]]] = {
    "plain": (lambda block: block, lambda stack: stack),
    "remat": (jax.checkpoint, lambda stack: stack),
    "each": (lambda block: jc.checkpoint(block, CODEC, coded_argnums=0), lambda stack: stack),
    "whole": (lambda block: block, lambda stack: jc.checkpoint(stack, CODEC)),
    "boundary, 8 bits": (
        lambda block: jc.checkpoint(
            block, jc.recipes.boundary(jc.Quantize(bits=8)), coded_argnums=0
        ),
        lambda stack: stack,
    ),
}


def measure(kind: str, strategy: str, target: str | None) -> dict[str, Any]:
    """Returns the bytes that one block adds: declared, allocated by XLA, and HBM traffic."""
    block, shape, shapes = BLOCKS[kind]
    around_block, around_stack = STRATEGIES[strategy]
    ready = around_block(block)

    def stack(x: jax.Array, blocks: Any) -> jax.Array:
        return functools.reduce(ready, blocks, x)

    def loss(x: jax.Array, blocks: Any) -> jax.Array:
        return jnp.mean(around_stack(stack)(x, blocks).astype(jnp.float32) ** 2)

    def struct(name: str, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        is_norm = name in ("scale", "bias")
        return jax.ShapeDtypeStruct(shape, jnp.float32 if is_norm else jnp.bfloat16)

    weights = {name: struct(name, shape) for name, shape in shapes.items()}
    fewer, more = (
        analyze(
            jax.grad(loss, (0, 1)),
            struct("x", shape),
            [weights] * count,
            target=target,
            xla_remat=False,
        )
        for count in (FEWER, MORE)
    )

    def slope(figure: str) -> float:
        return (getattr(more, figure) - getattr(fewer, figure)) / (MORE - FEWER)

    return {
        "declared_bytes": slope("declared_residual_bytes"),
        "compiled_bytes": slope("temp_bytes"),
        "hbm_traffic_bytes": slope("hbm_traffic_bytes"),
    }


@usage_errors()
def main(out: Out, target: Target = None) -> None:
    """Compile every block by every strategy; write checkpoint.json and checkpoint.md."""
    cases = [(kind, strategy) for kind in BLOCKS for strategy in STRATEGIES]
    rows = [
        {"block": kind, "strategy": strategy, **measure(kind, strategy, target)}
        for kind, strategy in track(cases, "compiling")
    ]
    content = describe_environment() | {"target": target, "rows": rows}
    write_json(out / "checkpoint.json", content)
    sizes = "declared MiB", "compiled MiB", "compiled / declared", "traffic MiB"
    table = [["block", "strategy", *sizes]]
    for row in rows:
        declared, compiled, traffic = (
            row[f"{kind}_bytes"] / 2**20 for kind in ("declared", "compiled", "hbm_traffic")
        )
        cells = f"{declared:.2f}", f"{compiled:.2f}", f"{compiled / declared:.2f}", f"{traffic:.1f}"
        table.append([row["block"], row["strategy"], *cells])
    title = f"Per block, bfloat16, compiled for {target}, {CODEC} unless stated otherwise:"
    typer.echo(write_table(out / "checkpoint.md", title, table, content["command"]))


if __name__ == "__main__":
    typer.run(main)
