"""Checks that a layer adds no more bytes to a compiled step than its codec declares.

    python -m experiments.bench.gates --target h100 --out experiments/results/gates-h100

Every operation is compiled with every codec that it takes, forward and backward, in a stack of
`FEWER` layers and one of `MORE` layers. The difference of the bytes alive at the peak, per layer,
is the memory that a layer adds. (A difference of one layer would be too small: a TPU may place a
whole array in VMEM.) XLA's temporary memory is listed too; on a TPU it includes gaps between
buffers of arbitrary size. The exit code is 1 if a layer adds more than `LIMIT` times what it
declares.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from jax import lax
from rich.progress import track

import jaxcomp as jc
from experiments.common.options import Out, Target, usage_errors
from experiments.common.record import describe_environment, read_table, write_json, write_table
from jaxcomp.memory._analyze import analyze_step
from jaxcomp.memory._targets import resolve
from jaxcomp.memory._tracing import trace

FEWER, MORE = 3, 6
LIMIT = 1.1
TPU_BATCH = (
    8  # times larger on TPUs, which place codes of a few MiB in VMEM, which no figure counts
)
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
        key = jax.random.key(weights[0][0].astype(jnp.int32))  # XLA would fold a constant
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
    """Returns the bytes that one layer adds: declared, alive, temporary, and HBM traffic."""
    layer = gate.layer(codec)
    batch, *rest = gate.shape
    shape = (batch * (TPU_BATCH if resolve(target).platform == "tpu" else 1), *rest)

    def figures(layers: int) -> dict[str, Any]:
        def loss(weights: Any, x: jax.Array, mixing: jax.Array) -> jax.Array:
            for own in weights:
                # A product without residuals, so that XLA does not fuse one layer with the next.
                x = lax.dot_general(layer(x, own), mixing, (((x.ndim - 1,), (0,)), ((), ())))
            return jnp.mean(x.astype(jnp.float32) ** 2)

        def bfloat16(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

        weights = [[bfloat16(shape) for shape in gate.weights] for _ in range(layers)]
        mixing = bfloat16((shape[-1], shape[-1]))
        step = jax.grad(loss, (0, 1))
        where = resolve(target)
        traced = trace(step, weights, bfloat16(shape), mixing, target=where)
        report, timeline, _ = analyze_step(traced, where, None, xla_remat=False, with_timeline=True)
        assert timeline is not None and report.argument_bytes is not None  # since it fits
        return {
            "declared_bytes": report.declared_residual_bytes,
            "alive_bytes": timeline.peak_bytes - report.argument_bytes,
            "temp_bytes": report.temp_bytes,
            "hbm_traffic_bytes": report.hbm_traffic_bytes,
        }

    fewer, more = figures(FEWER), figures(MORE)
    return {name: (more[name] - fewer[name]) / (MORE - FEWER) for name in more}


@usage_errors()
def main(
    out: Out,
    target: Target = None,
    add: Annotated[
        bool, typer.Option("--add", help="Keep the rows of an earlier run; compile only others.")
    ] = False,
) -> None:
    """Compile every operation with every codec; write gates.json and gates.md after every row."""
    cases = [(name, codec) for name, gate in GATES.items() for codec in gate.codecs]
    rows: list[dict[str, Any]] = []
    if add:
        rows = read_table(out / "gates.json", {"target": target})["rows"]
    there = {(row["operation"], row["codec"]) for row in rows}
    cases = [(name, codec) for name, codec in cases if (name, str(codec)) not in there]
    text = _write(out, target, rows)
    for name, codec in track(cases, "compiling"):
        figures = measure(GATES[name], codec, target)
        held = figures["alive_bytes"] <= LIMIT * figures["declared_bytes"]
        rows.append({"operation": name, "codec": str(codec), **figures, "held": held})
        text = _write(out, target, rows)
    typer.echo(text)
    raise typer.Exit(not all(row["held"] for row in rows))


def _write(out: Path, target: str | None, rows: list[dict[str, Any]]) -> str:
    content = describe_environment() | {"target": target, "limit": LIMIT, "rows": rows}
    write_json(out / "gates.json", content)
    sizes = "declared MiB", "alive MiB", "alive / declared", "temp MiB", "traffic MiB"
    table = [["operation", "codec", *sizes]]
    for row in rows:
        declared, alive, temp, traffic = (
            row[f"{kind}_bytes"] / 2**20 for kind in ("declared", "alive", "temp", "hbm_traffic")
        )
        cells = f"{declared:.2f}", f"{alive:.2f}", f"{alive / declared:.2f}", f"{temp:.2f}"
        table.append([row["operation"], row["codec"], *cells, f"{traffic:.1f}"])
    title = f"Per layer, bfloat16, compiled for {target}:"
    return write_table(out / "gates.md", title, table, content["command"])


if __name__ == "__main__":
    typer.run(main)
