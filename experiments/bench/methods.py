"""Compares the published methods on stock networks and on the same networks of `jaxcomp.models`.

    python -m experiments.bench.methods --out experiments/results/methods-h100

The steps are compiled ahead of time; nothing is run. Activations are the bytes that a step needs
besides its arguments.
"""

from typing import Annotated, Any

import typer

import jaxcomp as jc
from experiments.common.options import TARGET_HELP, Out, usage_errors
from experiments.common.record import describe_environment, make_folder, write_json, write_table
from experiments.zoo.steps import NETWORKS
from jaxcomp.models import steps

BATCH = 128
NAMES = {"resnet50": "resnet50_nnx", "resmlp_s24": "resmlp_s24"}  # of models, and in the zoo
SPECS = {
    "resnet50": (
        "plain",
        "pooling:window=2",
        "pooling:window=2,rest_bits=4",
        "actnn:level=L1",
        "actnn:level=L2",
        "actnn:level=L3",
        "division",
    ),
    "resmlp_s24": (
        "plain",
        "pruning:density=0.25",
        "pruning:density=0.25,rest_bits=2",
        "actnn:level=L2",
        "division",
    ),
}
HEADER = ("network", "row", "stock MiB", "jaxcomp.models MiB", "/", "stock ms", "jaxcomp.models ms")
FIGURES = ("total_bytes", "argument_bytes", "hbm_traffic_bytes", "estimated_seconds")


def compiled(network: str, spec: str, target: str) -> dict[str, Any]:
    """Compiles a row of a stock network and of the one of `jaxcomp.models`."""
    row: dict[str, Any] = {"network": network, "row": spec}
    factories = {"stock": NETWORKS[NAMES[network]].make_step, "own": steps.classifier(network)}
    for kind, make_step in factories.items():
        figures = jc.compare(make_step, [spec], batch=BATCH, target=target).rows[0].to_dict()
        if figures["error"]:
            raise ValueError(f"{kind} {network} {spec}: {figures['error']}")
        row[kind] = {name: figures[name] for name in FIGURES}
    return row


def cells(row: dict[str, Any]) -> list[str]:
    """Returns a row of the table."""
    stock, own = (
        (row[kind]["total_bytes"] - row[kind]["argument_bytes"]) / 2**20
        for kind in ("stock", "own")
    )
    times = [f"{1e3 * row[kind]['estimated_seconds']:.1f}" for kind in ("stock", "own")]
    return [
        row["network"],
        f"`{row['row']}`",
        f"{stock:,.0f}",
        f"{own:,.0f}",
        f"{stock / own:.2f}",
        *times,
    ]


@usage_errors()
def main(out: Out, target: Annotated[str, typer.Option(help=TARGET_HELP)] = "h100") -> None:
    """Compile the rows; write methods.json and methods.md."""
    make_folder(out)
    rows: list[dict[str, Any]] = []
    for network, specs in SPECS.items():
        for spec in specs:
            rows.append(compiled(network, spec, target))
            print(*cells(rows[-1]), flush=True)
            environment = describe_environment()
            content = environment | {"target": target, "batch": BATCH, "rows": rows}
            write_json(out / "methods.json", content)
            title = f"Activations and estimated times of steps of {BATCH} images, {target}"
            table = [HEADER, *map(cells, rows)]
            write_table(out / "methods.md", title, table, environment["command"])


if __name__ == "__main__":
    typer.run(main)
