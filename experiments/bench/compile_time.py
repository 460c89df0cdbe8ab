"""Where the time goes until a step can run: tracing, lowering, XLA.

    python -m experiments.bench.compile_time --out experiments/results/compile_time

Every row is traced, lowered and compiled ahead of time in each round, in turns; nothing is run. The
table has the medians, in seconds, and their sum over plain's. "Equations" are those of the
outermost jaxpr, "kernels" the fusions and calls of libraries in the compiled program. A cache of
compilations is not used. Both files are written after every round.
"""

import re
import statistics
import time
from typing import Annotated, Any

import jax
import typer
from rich.progress import track

from experiments.common.options import Out, usage_errors
from experiments.common.record import describe_environment, make_folder, write_json, write_table
from jaxcomp.memory._buffer_assignment import no_compilation_cache
from jaxcomp.memory._compiling import compile_step
from jaxcomp.memory._targets import resolve
from jaxcomp.models import _lm, steps
from jaxcomp.planning import MakeStep, Strategy
from jaxcomp.planning._watched import trace_step

ROWS = ("plain", "remat", "automatic:bits=4", "fused:bits=4", "quantize:bits=4")
NETWORKS: dict[str, tuple[MakeStep, int, tuple[str, ...]]] = {
    "resnet50": (steps.classifier("resnet50"), 128, ROWS),
    "lm": (_lm.lm, 8, tuple(row for row in ROWS if not row.startswith("fused"))),
}
TARGETS = ("h100", "v5e")
_PARTS = ("trace", "lower", "xla")
_KERNEL = re.compile(r" (?:fusion|custom-call)\(")


def measure(network: str, row: str, target: str) -> dict[str, Any]:
    """Seconds of each part, for one row, and what was traced and compiled."""
    make_step, batch, _ = NETWORKS[network]
    where = resolve(target)
    jax.clear_caches()
    start = time.perf_counter()
    traced, _ = trace_step(make_step, Strategy.parse(row), batch, where)
    then = time.perf_counter()
    traced.traced.lower(lowering_platforms=(where.platform,))
    lowered = time.perf_counter()
    with no_compilation_cache():
        compiled = compile_step(traced, where, xla_remat=where.platform == "tpu")
    return {
        "trace": then - start,
        "lower": lowered - then,
        "xla": compiled.compile_seconds,
        "equations": len(traced.jaxpr.eqns),
        "kernels": len(_KERNEL.findall(compiled.hlo_text)),
    }


@usage_errors()
def main(
    out: Out,
    network: Annotated[list[str] | None, typer.Option(help="Of NETWORKS; repeatable.")] = None,
    target: Annotated[list[str] | None, typer.Option(help="A device; repeatable.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each row is compiled.")] = 3,
) -> None:
    """Compile every row; write compile_time.json and compile_time.md."""
    unknown = set(network or ()) - set(NETWORKS)
    if unknown:
        raise ValueError(f"network={sorted(unknown)}: expected of {list(NETWORKS)}")
    make_folder(out)
    rows: list[dict[str, Any]] = []
    for name in network or NETWORKS:
        for where in target or TARGETS:
            mine: list[dict[str, Any]] = [
                {"network": name, "target": where, "row": row, "rounds": []}
                for row in NETWORKS[name][2]
            ]
            rows += mine
            for _ in track(range(rounds), f"{name} {where}"):
                for row in mine:
                    row["rounds"].append(measure(name, row["row"], where))
                content = describe_environment() | {"rows": rows}
                write_json(out / "compile_time.json", content)
                title = "Seconds until a step is compiled, medians:"
                text = write_table(out / "compile_time.md", title, table(rows), content["command"])
    typer.echo(text)


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The medians, and their sum over plain's of the same network and target."""
    lines = [["network", "target", "row", *_PARTS, "sum", "/ plain", "equations", "kernels"]]
    for row in rows:
        rounds = row["rounds"]
        medians = [statistics.median(one[part] for one in rounds) for part in _PARTS]
        whole = sum(medians)
        if row["row"] == "plain":
            plain = whole
        seconds = [f"{median:.1f}" for median in (*medians, whole)]
        counts = [f"{rounds[0][name]:,}" for name in ("equations", "kernels")]
        names = [row["network"], row["target"], row["row"]]
        lines.append([*names, *seconds, f"{whole / plain:.2f}", *counts])
    return lines


if __name__ == "__main__":
    typer.run(main)
