r"""Finds the longest context at which low-rank adapters of a decoder can be trained on one device.

    python -m experiments.bench.lora --out experiments/results/lora

The decoder has the sizes of Llama 3.2 3B. Its weights are frozen, in bfloat16; adapters of rank 16
(LoRA; Hu et al., arXiv:2106.09685) of all products of its layers are trained by AdamW. A batch is
one sequence. Attention (128 queries at once) and loss are computed in parts. Feed-forward networks
are computed again in the backward pass, by a `jax.checkpoint` of their own or of the layer. All
steps are compiled ahead of time; nothing is run.

Each row is compiled at two lengths. A line through the bytes of both estimates the longest context
that fits, which is compiled too. If it does not fit after all, the line through the last two
lengths gives the next. A compiler may reject a length without reporting bytes. Bisection then
ends when that length is at most 1/16 longer than the longest that fits.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
import typer
from rich.progress import track

import jaxcomp as jc
from experiments.bench.fits import largest
from experiments.common.options import Add, Out, usage_errors
from experiments.common.record import (
    describe_environment,
    make_folder,
    read_table,
    write_json,
    write_table,
)
from experiments.zoo.decoder import Layer, Sizes, loss, weight_shapes
from jaxcomp.memory import analyze, compiler_options, mesh
from jaxcomp.memory._targets import resolve

TARGETS = ("rtx4090", "v5e")
LENGTHS = 4096, 8192
STEP = 512  # the reported contexts are multiples of it
RANK = 16
_LAYER = {
    "layers": 28,
    "width": 3072,
    "hidden": 8192,
    "heads": 24,
    "kv_heads": 8,
    "queries": 128,
}


def _offloaded(*names: str) -> Callable[[Layer], Layer]:
    """Recomputes the layer from values of these names, which wait in the host's memory."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=names,
        offload_src="device",
        offload_dst="pinned_host",
    )

    def around(layer: Layer) -> Layer:
        def named(weights: Any, x: jax.Array) -> jax.Array:
            return layer(weights, jax.ad_checkpoint.checkpoint_name(x, "input"))

        return jax.checkpoint(named, policy=policy)

    return around


def _boundary(codec: jc.Codec) -> Callable[[Layer], Layer]:
    """Recomputes the layer from the codes of its input and of what its attention mixes."""
    policy = jc.recipes.boundary(codec)
    return lambda layer: jc.checkpoint(layer, policy, coded_argnums=1)


ROWS: dict[str, Callable[[Layer], Layer]] = {
    "plain": lambda layer: layer,
    "remat": jax.checkpoint,
    "remat, inputs offloaded": _offloaded("input"),
    "remat, inputs and contexts offloaded": _offloaded("input", "context"),
    "automatic:bits=4": lambda layer: jc.checkpoint(layer, "automatic:bits=4"),
    "boundary:bits=8": _boundary(jc.Quantize(8)),
    "boundary:bits=4": _boundary(jc.Quantize(4)),
    "boundary, exact, offloaded": _boundary(jc.Offload(jc.Exact())),
    "boundary:bits=8, offloaded": _boundary(jc.Offload(jc.Quantize(8))),
    "boundary:bits=4, offloaded": _boundary(jc.Offload(jc.Quantize(4))),
}


def make_step(row: str, target: str, length: int) -> tuple[Any, tuple[Any, ...]]:
    """The step of a row, and the shapes of its arguments."""
    # `jax.checkpoint` of a layer needs more if it has another one in it.
    sizes = Sizes(**_LAYER, length=length, again=not row.startswith("remat"))
    optimizer = optax.adamw(1e-4)
    over = mesh(target, (1,), ("data",))
    frozen = jax.tree.map(
        lambda weight: jax.ShapeDtypeStruct(weight.shape, jnp.bfloat16), weight_shapes(sizes)
    )
    adapters = {
        name: (
            jax.ShapeDtypeStruct((*weight.shape[:2], RANK), jnp.float32),
            jax.ShapeDtypeStruct((weight.shape[0], RANK, weight.shape[2]), jnp.float32),
        )
        for name, weight in frozen["layers"].items()
        if len(weight.shape) == 3
    }

    def step(adapters: Any, state: Any, frozen: Any, tokens: jax.Array) -> tuple[Any, Any]:
        def of(adapters: Any) -> jax.Array:
            layers = frozen["layers"] | {"adapters": adapters}
            return loss(sizes, over, ROWS[row], frozen | {"layers": layers}, tokens)

        updates, state = optimizer.update(jax.grad(of)(adapters), state, adapters)
        return optax.apply_updates(adapters, updates), state

    jitted = jax.jit(step, donate_argnums=(0, 1), compiler_options=compiler_options())
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    return jitted, (adapters, jax.eval_shape(optimizer.init, adapters), frozen, tokens)


def measure(row: str, target: str) -> dict[str, Any]:
    """Compiles a row at the lengths of `LENGTHS` and at the longest that fits."""
    part = resolve(target)
    room = part.usable_bytes or 0
    points: dict[int, dict[str, Any]] = {}

    def compile_at(length: int) -> None:
        step, arguments = make_step(row, target, length)
        figures = analyze(step, *arguments, target=target, xla_remat=False).to_dict()
        points[length] = {k: figures[k] for k in ("total_bytes", "estimated_seconds")}

    for length in LENGTHS:
        compile_at(length)
    while True:
        needed = {n: point["total_bytes"] for n, point in points.items() if point["total_bytes"]}
        longest = max((n for n, nbytes in needed.items() if nbytes <= room), default=0)
        rejected = min(points.keys() - needed.keys(), default=0)
        if rejected:
            following = (longest + rejected) // 2 // STEP * STEP
            is_close = rejected <= longest * 17 / 16
        else:
            following = largest(needed, {target: room}, STEP)[target]
            is_close = longest > LENGTHS[1]
        if is_close or following in points or following < STEP:
            return {"row": row, "target": target, "longest": longest, "points": points}
        compile_at(following)


@usage_errors()
def main(
    out: Out,
    target: Annotated[list[str] | None, typer.Option(help="A device; repeatable.")] = None,
    row: Annotated[list[str] | None, typer.Option(help="Of ROWS; repeatable.")] = None,
    add: Add = False,
) -> None:
    """Find each longest context; write lora.json and lora.md after every row."""
    unknown = set(row or ()) - set(ROWS)
    if unknown:
        raise ValueError(f"row={sorted(unknown)}: expected of {list(ROWS)}")
    make_folder(out)
    path = out / "lora.json"
    rows = {(r["target"], r["row"]): r for r in read_table(path, {})["rows"]} if add else {}
    text = ""
    for where in target or TARGETS:
        for name in track(row or list(ROWS), where):
            rows[where, name] = measure(name, where)
            text = _write(out, list(rows.values()))
    typer.echo(text)


def _write(out: Path, rows: list[dict[str, Any]]) -> str:
    content = describe_environment() | {"rows": rows}
    write_json(out / "lora.json", content)
    table = [["target", "row", "longest context", f"MiB at {LENGTHS[1]}", "ms at it"]]
    for row in rows:
        point = {int(n): point for n, point in row["points"].items()}[LENGTHS[1]]
        cells = [
            "" if value is None else f"{value / unit:,.0f}"
            for value, unit in ((point["total_bytes"], 2**20), (point["estimated_seconds"], 1e-3))
        ]
        table.append([row["target"], row["row"], f"{row['longest']:,}", *cells])
    title = "LoRA of a decoder with the sizes of Llama 3.2 3B, one sequence, as compiled:"
    return write_table(out / "lora.md", title, table, content["command"])


if __name__ == "__main__":
    typer.run(main)
