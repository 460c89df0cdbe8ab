r"""Compares the memory, traffic and collectives of sharded training steps, per device.

    python -m experiments.bench.sharding --out experiments/results/sharding
    python -m experiments.bench.sharding --case "decoder, fsdp" --target h100:8 --out OUT

All steps are compiled ahead of time; nothing is run. `data` has a copy of parameters and optimizer
on each device, `fsdp` shards them. Each device has 128 images (ResNet-50) or one sequence of 4,096
tokens (the decoder).
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer

import jaxcomp as jc
from experiments.common.options import Add, Out, usage_errors
from experiments.common.record import (
    describe_environment,
    make_folder,
    read_table,
    write_json,
    write_table,
)
from experiments.zoo.decoder import NAMES, Layer, Sizes, make_step
from jaxcomp.memory import CompileError, analyze, compiler_options, mesh
from jaxcomp.memory._targets import resolve
from jaxcomp.models import steps
from jaxcomp.models.steps import sharded
from jaxcomp.planning import Strategy

TARGETS = ("h100:8", "v5e:4x4", "v5p:8x8x4")
_policies = jax.checkpoint_policies


def _names(codec: jc.Codec) -> Callable[[Layer], Layer]:
    """Saves the names of a layer by a codec."""
    policy = jc.recipes.save_names(dict.fromkeys(NAMES, codec))
    return lambda layer: jc.checkpoint(layer, policy)


def _remat(policy: Any) -> Callable[[Layer], Layer]:
    return lambda layer: jax.checkpoint(layer, policy=policy)


DECODER: dict[str, Callable[[Layer], Layer]] = {
    "plain": lambda layer: layer,
    "remat": _remat(None),
    "remat, names kept": _remat(_policies.save_only_these_names(*NAMES)),
    "remat, names offloaded": _remat(
        _policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[*NAMES],
            offload_src="device",
            offload_dst="pinned_host",
        )
    ),
    "names in Float8": _names(jc.Float8()),
    "names in 4 bits": _names(jc.Quantize(4)),
    "names in Float8, offloaded": _names(jc.Offload(jc.Float8())),
    "automatic:bits=4": lambda layer: jc.checkpoint(layer, "automatic:bits=4"),
}
RESNET = ("plain", "remat", "accumulate:4", "offload", "automatic:bits=4", "fused:bits=4")
CASES = {
    "resnet50, data": RESNET,
    "resnet50, fsdp": RESNET,
    "decoder, fsdp": tuple(DECODER),
}
HEADER = (
    "case",
    "target",
    "row",
    "arguments MiB",
    "temp MiB",
    "needs MiB",
    "host MiB",
    "HBM traffic MB",
    "host traffic MB",
    "collectives MB",
    "estimate, ms",
    "compile s",
)


def build(case: str, target: str, row: str) -> tuple[Any, tuple[Any, ...]]:
    """The step of a row, and the shapes of its arguments with their shardings."""
    devices = resolve(target).devices
    over = mesh(target, (devices,), ("data",))
    fsdp = case.endswith("fsdp")
    if case.startswith("resnet50"):
        factory = steps.classifier("resnet50", mesh=over, fsdp=fsdp)
        return factory(Strategy.parse(row), 128 * devices)
    sizes = Sizes()
    step, weights, optimizer = make_step(sizes, over, DECODER[row])
    state = jax.eval_shape(optimizer.init, weights)
    tokens = jax.ShapeDtypeStruct((devices, sizes.length), jnp.int32)
    (weights, state), tokens = sharded(((weights, state), tokens), over, fsdp=fsdp)
    jitted = jax.jit(step, donate_argnums=(0, 1), compiler_options=compiler_options())
    return jitted, (weights, state, tokens)


def measure(case: str, target: str, row: str) -> dict[str, Any]:
    """The figures of a row; an error if it does not compile."""
    start = time.perf_counter()
    found: dict[str, Any] = {"case": case, "target": target, "row": row, "error": None}
    try:
        step, arguments = build(case, target, row)
        report = analyze(step, *arguments, target=target)
    except (CompileError, ValueError, TypeError) as error:
        return found | {"error": str(error)[:500], "seconds": time.perf_counter() - start}
    return found | report.to_dict() | {"seconds": time.perf_counter() - start}


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""

    def scaled(key: str, unit: float, digits: int = 0) -> str:
        return "" if row.get(key) is None else f"{row[key] / unit:,.{digits}f}"

    first = [row["case"], row["target"], row["row"]]
    if row["error"]:
        return [*first, "failed", *[""] * 8]
    return [
        *first,
        scaled("argument_bytes", 2**20),
        scaled("temp_bytes", 2**20),
        scaled("total_bytes", 2**20) + (" (does not fit)" if row["fits"] is False else ""),
        scaled("host_temp_bytes", 2**20),
        scaled("hbm_traffic_bytes", 1e6),
        scaled("host_traffic_bytes", 1e6),
        scaled("collective_bytes", 1e6, 1),
        scaled("estimated_seconds", 1e-3, 1),
        f"{row['compile_seconds'] or row['seconds']:.0f}",
    ]


@usage_errors()
def main(
    out: Out,
    case: Annotated[
        list[str] | None, typer.Option(help="Of CASES; repeatable. Default: all.")
    ] = None,
    target: Annotated[
        list[str] | None, typer.Option(help="Devices, such as h100:8; repeatable.")
    ] = None,
    row: Annotated[list[str] | None, typer.Option(help="A row of the case; repeatable.")] = None,
    add: Add = False,
) -> None:
    """Compile every row; nothing is run."""
    unknown = set(case or ()) - set(CASES)
    if unknown:
        raise ValueError(f"case={sorted(unknown)}: expected of {list(CASES)}")
    make_folder(out)
    path = out / "sharding.json"
    rows = {} if not add else {_key(r): r for r in read_table(path, {})["rows"]}
    for name in case or CASES:
        for where in target or TARGETS:
            for one in row or CASES[name]:
                found = measure(name, where, one)
                rows[_key(found)] = found
                typer.echo(" | ".join(cells(found)))
                write(out, list(rows.values()))


def _key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["case"], row["target"], row["row"]


def write(out: Path, rows: list[dict[str, Any]]) -> None:
    """Writes sharding.json and sharding.md."""
    content = describe_environment() | {"rows": rows}
    write_json(out / "sharding.json", content)
    title = "Sharded training steps, figures of one device, as compiled; nothing was run:"
    table = [HEADER, *(cells(row) for row in rows)]
    write_table(out / "sharding.md", title, table, content["command"])


if __name__ == "__main__":
    typer.run(main)
