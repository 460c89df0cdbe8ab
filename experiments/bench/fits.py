"""The largest batch of a ResNet's training step that small GPUs hold, several ways.

    python -m experiments.bench.fits --out experiments/results/fits-resnet50

Each figure is compiled: that batch fits what JAX preallocates of the GPU, one `STEP` larger (or
one larger by 1%, if that is more) does not.
"""

from functools import partial
from typing import Annotated, Any

import typer
from rich.progress import Progress

from experiments.bench.memory import Out, Ways
from experiments.record import describe_environment, write_json
from jaxcomp import memory
from jaxcomp.models import steps
from jaxcomp.ways import Way

WAYS = ("plain", "remat", "accumulate:4", "quantize:bits=2", "fused:bits=4", "fused:bits=2")
PARTS = ("rtx4060-8gb", "rtx3060-12gb", "rtx4060ti-16gb", "rtx3090")
STEP = 8


def main(
    out: Out,
    way: Ways = None,
    part: Annotated[list[str] | None, typer.Option(help="A target; repeat for more.")] = None,
    model: str = "resnet50",
) -> None:
    """Finds each largest batch; writes fits.json and fits.md."""
    ways, parts = way or list(WAYS), part or list(PARTS)
    make_step = steps.classifier(model)
    rows: list[dict[str, Any]] = []
    with Progress() as progress:
        task = progress.add_task("compiling", total=len(ways) * len(parts))
        for name in ways:
            transform = Way.parse(name)
            make = partial(make_step, transform)
            largest = {}
            for target in parts:
                largest[target] = memory.max_batch(make, target, multiple=STEP)
                progress.advance(task)
            rows.append({"row": name, "largest_batch": largest})
    content = describe_environment() | {"model": model, "multiple": STEP, "rows": rows}
    write_json(out / "fits.json", content)
    lines = [
        f"{model}, 224px, bfloat16, whole SGD step: the largest batch, in steps of {STEP}:\n",
        f"| way | {' | '.join(parts)} |",
        f"| --- | {' | '.join('---' for _ in parts)} |",
        *(
            f"| {row['row']} | {' | '.join(str(row['largest_batch'][name]) for name in parts)} |"
            for row in rows
        ),
    ]
    text = "\n".join([*lines, f"\n    {content['command']}\n"])
    (out / "fits.md").write_text(text)
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)
