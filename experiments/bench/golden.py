r"""Compiled figures of ten training steps, compared to the byte with those of an earlier run.

    python -m experiments.bench.golden --out experiments/results/golden-h100
    python -m experiments.bench.golden --out OUT \
        --against experiments/results/golden-h100/golden.json

Nothing is run: each step is compiled ahead of time, and XLA's own memory analysis is read. A change
that should not alter what XLA compiles leaves every figure as it was.
"""

import json
from pathlib import Path
from typing import Annotated

import jax.numpy as jnp
import typer

from experiments import transformers
from experiments.options import Out, usage_errors
from experiments.record import describe_environment, write_json
from jaxcomp import planning
from jaxcomp.models import steps

ROWS: dict[str, tuple[str, ...]] = {
    "resnet50": (
        "plain",
        "remat",
        "accumulate:4",
        "quantize:bits=2",
        "fused:bits=4",
        "fused:bits=2",
        "pooling:window=2",
        "offload:fused:bits=2",
    ),
    "resmlp_s24": ("pruning:density=0.25,rest_bits=2",),
    "lm": ("transformer:bits=4",),
}
FIGURES = ("temp_bytes", "peak_bytes", "hbm_traffic_bytes")


def differences(before: list[dict[str, object]], after: list[dict[str, object]]) -> list[str]:
    """What differs between the rows of two runs, one line for each figure."""
    lines = []
    for one, other in zip(before, after, strict=True):
        for figure in FIGURES:
            if one[figure] != other[figure]:
                name = f"{other['model']} {other['row']}"
                lines.append(f"{name}: {figure} {one[figure]} -> {other[figure]}")
    return lines


@usage_errors()
def main(
    out: Out,
    against: Annotated[Path | None, typer.Option(help="golden.json of an earlier run.")] = None,
    target: str = "h100",
) -> None:
    """Compiles the ten rows; writes golden.json; exits with 1 if a figure differs."""
    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, object]] = []
    for model, specs in ROWS.items():
        images = steps.classifier(model, 224, jnp.bfloat16) if model != "lm" else transformers.lm
        batch = 8 if model == "lm" else 128
        for spec in specs:
            table = planning.compare(images, [spec], batch=batch, target=target)
            figures = table.rows[0].to_dict()
            if figures["error"]:
                raise ValueError(f"{model} {spec}: {figures['error']}")
            rows.append(
                {"model": model, "batch": batch, "row": spec}
                | {figure: figures[figure] for figure in FIGURES}
            )
            print(*rows[-1].values(), flush=True)
            write_json(
                out / "golden.json", describe_environment() | {"target": target, "rows": rows}
            )
    if against is not None:
        found = differences(json.loads(against.read_text())["rows"], rows)
        print("\n".join(found) or f"every figure is as in {against}")
        raise typer.Exit(bool(found))


if __name__ == "__main__":
    typer.run(main)
