r"""Compares the memory and HBM traffic of eleven training steps with an earlier run, to the byte.

    python -m experiments.bench.golden --out experiments/results/golden-h100
    python -m experiments.bench.golden --out OUT \
        --against experiments/results/golden-h100/golden.json

The steps are compiled ahead of time; nothing is run. Use it to prove that a change of the code does
not change the compiled programs.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

import jaxcomp as jc
from experiments.common.options import TARGET_HELP, Out, usage_errors
from experiments.common.record import describe_environment, write_json
from experiments.zoo import transformers
from jaxcomp.models import _lm, steps

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
    "long_lm": ("transformer:bits=4",),
}
LANGUAGE_MODELS = {"lm": (_lm.lm, 8), "long_lm": (transformers.long_lm, 1)}
FIGURES = ("temp_bytes", "peak_bytes", "hbm_traffic_bytes")


def differences(before: list[dict[str, object]], after: list[dict[str, object]]) -> list[str]:
    """Lists the figures that differ between two runs of the same rows, one line for each."""
    lines = []
    for one, other in zip(before, after, strict=True):
        for figure in FIGURES:
            if one[figure] != other[figure]:
                name = f"{other['model']} {other['row']}"
                lines.append(f"{name}: {figure} {one[figure]} -> {other[figure]}")
    return lines


def compiled(model: str, spec: str, target: str) -> dict[str, object]:
    """Compiles a row and returns its figures."""
    make_step, batch = LANGUAGE_MODELS.get(model) or (steps.classifier(model), 128)
    figures = jc.compare(make_step, [spec], batch=batch, target=target).rows[0].to_dict()
    if figures["error"]:
        raise ValueError(f"{model} {spec}: {figures['error']}")
    identity = {"model": model, "batch": batch, "row": spec}
    return identity | {figure: figures[figure] for figure in FIGURES}


@usage_errors()
def main(
    out: Out,
    against: Annotated[
        Path | None, typer.Option(help="Compare with this golden.json of an earlier run.")
    ] = None,
    target: Annotated[str, typer.Option(help=TARGET_HELP)] = "h100",
) -> None:
    """Compile the rows; write golden.json; exit with 1 if a figure differs."""
    rows: list[dict[str, object]] = []
    for model, specs in ROWS.items():
        for spec in specs:
            rows.append(compiled(model, spec, target))
            print(*rows[-1].values(), flush=True)
            content = describe_environment() | {"target": target, "rows": rows}
            write_json(out / "golden.json", content)
    if against is not None:
        found = differences(json.loads(against.read_text())["rows"], rows)
        print("\n".join(found) or f"All figures equal those in {against}.")
        raise typer.Exit(bool(found))


if __name__ == "__main__":
    typer.run(main)
