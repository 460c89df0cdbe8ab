"""Compares the kernels that compute weight gradients from block-sparse activations.

    python -m experiments.bench.block_sparse --out experiments/results/block_sparse

"rows" and the TPU kernel read the blocks, "dense" decodes them first. For the target: FLOPs, HBM
traffic and temporary memory of one compiled weight gradient. On the attached device: the time
relative to "dense", each the minimum over several interleaved runs. A CPU runs the portable
products alone, in float32 and on a smaller batch. With `--target gpu` an attached GPU is compiled
for and runs all.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from rich.progress import track

import jaxcomp as jc
from experiments.common.options import TARGET_HELP, Out, usage_errors
from experiments.common.record import describe_environment, write_json, write_table
from jaxcomp.codecs._block_sparse import Product
from jaxcomp.memory import analyze
from jaxcomp.memory._targets import resolve
from jaxcomp.ops import _block_product as block_product
from jaxcomp.ops import _block_tpu as block_tpu

PORTABLE: tuple[Product, ...] = ("dense", "rows")
MATRICES = {  # batch, tokens, features, columns: linear layers of ResMLP-S24 at 224 pixels
    "mixing": (128, 384, 196, 196),
    "fc2": (128, 196, 1536, 384),
}
BLOCKS = ((8, 8), (32, 8), (256, 8))
DENSITIES = (0.1, 0.25, 0.5)
CPU_BATCH = 8  # batch size of the runs on a CPU, in float32
CALLS = 10  # of a kernel in one timed run, which hides what the host takes to start it

Gradient = Callable[[jc.codecs.Encoded, jax.Array], jax.Array]


def gradient(
    codec: jc.BlockSparse, product: Product, x: jax.Array | jax.ShapeDtypeStruct, columns: int
) -> Gradient:
    """Returns the function from a code and a cotangent to the float32 weight gradient."""
    codec = dataclasses.replace(codec, product=product)
    return block_product.gradient(codec, x, columns, jnp.float32)


def compiled(
    codec: jc.BlockSparse, product: Product, shape: tuple[int, ...], target: str
) -> dict[str, Any]:
    """Returns XLA's figures for the target, in bfloat16."""
    *tokens, features, columns = shape
    x, g = (jax.ShapeDtypeStruct((*tokens, n), jnp.bfloat16) for n in (features, columns))
    code = jax.eval_shape(codec.encode, x)

    # `analyze` differentiates the function to find its residuals; a kernel has no derivative.
    @jax.custom_vjp
    def run(code: jc.codecs.Encoded, g: jax.Array) -> jax.Array:
        return gradient(codec, product, x, columns)(code, g)

    run.defvjp(lambda code, g: (run(code, g), None), lambda _, dw: (None, None))
    report = analyze(run, code, g, target=target, xla_remat=False)
    return {
        "flops": report.flops,
        "hbm_traffic_bytes": report.hbm_traffic_bytes,
        "temp_bytes": report.temp_bytes,
    }


def seconds(
    codec: jc.BlockSparse, shape: tuple[int, ...], products: list[Product], runs: int
) -> dict[str, float]:
    """Returns the minimum time of each product that the device runs, over interleaved runs."""
    rng = np.random.default_rng(0)
    batch, *tokens, features, columns = shape
    dtype = jnp.bfloat16
    if jax.default_backend() == "cpu":
        batch, dtype, products = CPU_BATCH, jnp.float32, [p for p in products if p in PORTABLE]
    x, g = (jnp.asarray(rng.normal(size=(batch, *tokens, n)), dtype) for n in (features, columns))
    code = jax.jit(codec.encode)(x)
    steps = {p: jax.jit(gradient(codec, p, x, columns)).lower(code, g).compile() for p in products}
    times: dict[str, list[float]] = {p: [] for p in products}
    for _, (name, step) in itertools.product(range(runs + 1), steps.items()):
        start = time.perf_counter()
        jax.block_until_ready([step(code, g) for _ in range(CALLS)])
        times[name].append((time.perf_counter() - start) / CALLS)
    return {name: min(found[1:]) for name, found in times.items()}


@usage_errors()
def main(
    out: Out,
    target: Annotated[str, typer.Option(help=TARGET_HELP)] = "h100",
    matrix: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(MATRICES)}; repeatable. Default: all.")
    ] = None,
    densities: Annotated[
        list[float] | None,
        typer.Option(
            "--density",
            help="Fraction of the blocks that is kept; repeatable. "
            f"Default: {', '.join(map(str, DENSITIES))}.",
        ),
    ] = None,
    runs: Annotated[int, typer.Option(help="Timed runs of each product.")] = 5,
) -> None:
    """Compile and time every case; write block_sparse.json and block_sparse.md."""
    rows: list[dict[str, Any]] = []
    unknown = set(matrix or ()) - set(MATRICES)
    if unknown:
        raise typer.BadParameter(f"matrix={sorted(unknown)}: expected of {list(MATRICES)}")
    matrices = [(name, MATRICES[name]) for name in matrix or MATRICES]
    cases = [*itertools.product(matrices, BLOCKS, densities or DENSITIES)]
    for_tpu = resolve(target).platform == "tpu"
    for (name, shape), block, density in track(cases, "compiling"):
        codec = jc.BlockSparse(block, density)
        products = [*PORTABLE]
        if for_tpu and block_tpu.refusal(codec, shape[:-1]) is None:
            products.append("tpu")
        times = seconds(codec, shape, products, runs)
        for product in products:
            case = {"matrix": name, "block": block, "density": density, "product": product}
            rows.append(case | compiled(codec, product, shape, target))
            if product in times:
                rows[-1]["seconds"] = times[product]
                rows[-1]["time_over_dense"] = times[product] / times["dense"]
        text = save(out, target, rows)
    typer.echo(text)


def save(out: Path, target: str, rows: list[dict[str, Any]]) -> str:
    """Writes the finished rows and returns their table."""
    content = describe_environment() | {"target": target, "rows": rows}
    write_json(out / "block_sparse.json", content)
    table = [["matrix", "block", "density", "product", "GFLOP", "traffic MiB", "temp MiB", "time"]]
    for row in rows:
        traffic, temp = (row[f"{kind}_bytes"] / 2**20 for kind in ("hbm_traffic", "temp"))
        ratio = f"{row['time_over_dense']:.2f}" if "time_over_dense" in row else ""
        figures = f"{row['flops'] / 1e9:.1f}", f"{traffic:.0f}", f"{temp:.0f}", ratio
        side = "x".join(map(str, row["block"]))
        table.append([row["matrix"], side, str(row["density"]), row["product"], *figures])
    device = content["devices"][0]
    kind = (
        f"float32, batch {CPU_BATCH}" if jax.default_backend() == "cpu" else "bfloat16, batch 128"
    )
    title = (
        f"Weight gradients compiled for {target}, bfloat16, batch 128. Time on one {device} "
        f"relative to dense, {kind}:"
    )
    return write_table(out / "block_sparse.md", title, table, content["command"])


if __name__ == "__main__":
    typer.run(main)
