"""Bytes that one more layer adds to a compiled step, against the bytes that its codec declares.

    python -m experiments.bench.gates --target h100 --out experiments/results/gates-h100

Every operation with every codec it takes: two stacks, of `FEWER` and of `MORE` layers, forward and
backward. The difference of XLA's scratch memory is what the layers really keep; one layer more
would not do, as a TPU may move a whole array to VMEM. Exits with 1 if a layer keeps more than
`LIMIT` times what it declares.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import typer
from jax import lax
from rich.progress import track

import jaxcomp as jc
from experiments.bench.memory import Out, Target
from experiments.record import describe_environment, write_json, write_table
from jaxcomp.memory import analyze

FEWER, MORE = 4, 8
LIMIT = 1.1
MAP = (512, 28, 28, 128)
TOKENS = (1024, 128, 512)

Layer = Callable[[jax.Array, Any], jax.Array]

FLOATS = (jc.Cast("float8_e4m3fn"), *(jc.Quantize(bits) for bits in (1, 2, 3, 4, 8)))


@dataclasses.dataclass(frozen=True)
class Gate:
    """An operation under test.

    Attributes:
        codecs: Codecs it takes.
        shape: Shape of its input and of its result.
        weights: Shapes of its parameters.
        layer: Makes the operation for a codec.
    """

    codecs: tuple[jc.Codec, ...]
    shape: tuple[int, ...]
    weights: tuple[tuple[int, ...], ...]
    layer: Callable[[jc.Codec], Layer]


def _conv(codec: jc.Codec) -> Layer:
    layout = ("NHWC", "HWIO", "NHWC")

    def layer(x: jax.Array, weights: Any) -> jax.Array:
        return jc.ops.conv_general_dilated(
            x, weights[0], (1, 1), "SAME", dimension_numbers=layout, codec=codec
        )

    return layer


def _dot(codec: jc.Codec) -> Layer:
    def layer(x: jax.Array, weights: Any) -> jax.Array:
        return jc.ops.dot_general(x, weights[0], (((2,), (0,)), ((), ())), codec=codec)

    return layer


def _batch_norm(codec: jc.Codec) -> Layer:
    return lambda x, weights: jc.ops.batch_norm(x, *weights, codec=codec)[0]


def _layer_norm(codec: jc.Codec) -> Layer:
    return lambda x, weights: jc.ops.layer_norm(x, *weights, codec=codec)


def _norm_act(codec: Any) -> Layer:
    def layer(x: jax.Array, weights: Any) -> jax.Array:
        unit, *_ = jc.ops.norm_act(x, *weights, codec=codec)
        return unit.value

    return layer


def _affine(codec: jc.Codec) -> Layer:
    return lambda x, weights: jc.ops.affine(x, *weights, codec=codec)


def _gelu(codec: jc.Codec) -> Layer:
    return lambda x, weights: jc.ops.gelu(x, codec=codec)


def _dropout(codec: jc.Codec) -> Layer:
    def layer(x: jax.Array, weights: Any) -> jax.Array:
        key = jax.random.key(weights[0][0].astype(jnp.int32))  # no constant, which XLA would fold
        return jc.ops.dropout(x, key, 0.5)

    return layer


def _relu(codec: jc.Codec) -> Layer:
    return lambda x, weights: jc.ops.relu(x)


def _max_pool(codec: Any) -> Layer:
    return lambda x, weights: jc.ops.max_pool(x, (2, 2), padding="SAME", codec=codec)


CHANNELS = MAP[-1]
GATES = {
    "conv": Gate(
        (*FLOATS, jc.AvgPool(2), jc.DualPrecision(), jc.PerSample((4, 2, 1, 1))),
        MAP,
        ((3, 3, CHANNELS, CHANNELS),),
        _conv,
    ),
    "dot": Gate((*FLOATS, jc.BlockSparse()), TOKENS, ((TOKENS[-1], TOKENS[-1]),), _dot),
    "batch_norm": Gate(FLOATS, MAP, ((CHANNELS,), (CHANNELS,)), _batch_norm),
    "norm_act": Gate(
        tuple(jc.SignAware(bits) for bits in (2, 3, 4)), MAP, ((CHANNELS,), (CHANNELS,)), _norm_act
    ),
    "layer_norm": Gate(FLOATS, TOKENS, ((TOKENS[-1],), (TOKENS[-1],)), _layer_norm),
    "affine": Gate(FLOATS, TOKENS, ((TOKENS[-1],), (TOKENS[-1],)), _affine),
    "gelu": Gate(FLOATS, TOKENS, (), _gelu),
    "dropout": Gate((jc.Packed(1),), TOKENS, ((1,),), _dropout),
    "relu": Gate((jc.Packed(1),), MAP, (), _relu),
    "max_pool": Gate((jc.Packed(2), jc.Packed(4)), MAP, (), _max_pool),
}


def measure(gate: Gate, codec: jc.Codec, target: str | None) -> dict[str, Any]:
    """What one more layer declares, keeps and moves, in bytes."""
    layer = gate.layer(codec)

    def report(layers: int) -> Any:
        def loss(weights: Any, x: jax.Array, mixing: jax.Array) -> jax.Array:
            for own in weights:
                # A product that keeps nothing, so that layers do not melt into each other.
                x = lax.dot_general(layer(x, own), mixing, (((x.ndim - 1,), (0,)), ((), ())))
            return jnp.mean(x.astype(jnp.float32) ** 2)

        def bfloat16(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

        weights = [[bfloat16(shape) for shape in gate.weights] for _ in range(layers)]
        mixing = bfloat16((gate.shape[-1], gate.shape[-1]))
        step = jax.grad(loss, (0, 1))
        return analyze(step, weights, bfloat16(gate.shape), mixing, target=target, xla_remat=False)

    fewer, more = report(FEWER), report(MORE)

    def slope(figure: str) -> float:
        return (getattr(more, figure) - getattr(fewer, figure)) / (MORE - FEWER)

    return {
        "declared_bytes": slope("declared_residual_bytes"),
        "compiled_bytes": slope("temp_bytes"),
        "hbm_traffic_bytes": slope("hbm_traffic_bytes"),
    }


def main(out: Out, target: Target = None) -> None:
    """Compiles every gate; writes gates.json and gates.md."""
    cases = [(name, codec) for name, gate in GATES.items() for codec in gate.codecs]
    rows: list[dict[str, Any]] = []
    for name, codec in track(cases, "compiling"):
        figures = measure(GATES[name], codec, target)
        held = figures["compiled_bytes"] <= LIMIT * figures["declared_bytes"]
        rows.append({"operation": name, "codec": str(codec), **figures, "held": held})
    content = describe_environment() | {"target": target, "limit": LIMIT, "rows": rows}
    write_json(out / "gates.json", content)
    sizes = "declared MiB", "compiled MiB", "compiled / declared", "traffic MiB"
    table = [["operation", "codec", *sizes]]
    for row in rows:
        declared, compiled, traffic = (
            row[f"{kind}_bytes"] / 2**20 for kind in ("declared", "compiled", "hbm_traffic")
        )
        cells = f"{declared:.2f}", f"{compiled:.2f}", f"{compiled / declared:.2f}", f"{traffic:.1f}"
        table.append([row["operation"], row["codec"], *cells])
    title = f"One more layer, bfloat16, compiled for {target}:"
    typer.echo(write_table(out / "gates.md", title, table, content["command"]))
    raise typer.Exit(not all(row["held"] for row in rows))


if __name__ == "__main__":
    typer.run(main)
