r"""Fits a training step to falling budgets: how the chosen plan's memory and time follow.

    python -m experiments.bench.budgets --network vit_b16 --target rtx3060-12gb \
        --out experiments/results/budgets-vit_b16-rtx3060

Budgets are fractions of what the plain step needs. All steps are compiled ahead of time; nothing is
run. The estimate is that of `jc.fit`.
"""

import itertools
import time
from typing import Annotated, Any

import typer

from experiments.bench.fit import compiled, factory, name_of
from experiments.common.options import TARGET_HELP, Out, usage_errors
from experiments.common.record import describe_environment, make_folder, write_json, write_table
from jaxcomp.planning import DoesNotFitError, fit

FRACTIONS = (0.8, 0.7, 0.6, 0.55, 0.5, 0.45, 0.4, 0.35, 0.3, 0.25)
HEADER = ("budget / plain", "budget MiB", "chosen", "needs MiB", "estimate, ms", "compilations")


def fitted(network: str, target: str, budget: int) -> dict[str, Any]:
    """The plan for a budget."""
    make_step, batch = factory(network)
    start = time.perf_counter()
    try:
        plan = fit(make_step, batch=batch, budget=budget, allowance=0, target=target)
    except DoesNotFitError as error:
        return {"error": str(error), "seconds": time.perf_counter() - start}
    return {
        "chosen": name_of(plan),
        "total_bytes": plan.total_bytes,
        "milliseconds": plan.milliseconds,
        "compiled": [[c.name, c.total_bytes, c.milliseconds, c.fits] for c in plan.frontier],
        "errors": plan.errors,
        "seconds": time.perf_counter() - start,
    }


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    first = [f"{row['fraction']:.2f}", f"{row['budget_bytes'] / 2**20:,.0f}"]
    if "error" in row:
        return [*first, "nothing fits", "", "", ""]
    return [
        *first,
        row["chosen"],
        f"{row['total_bytes'] / 2**20:,.0f}",
        f"{row['milliseconds']:.2f}",
        str(len(row["compiled"])),
    ]


def rises(rows: list[dict[str, Any]]) -> int:
    """How often the memory is more than that for the next larger budget."""
    needed = [row["total_bytes"] for row in rows if "error" not in row]
    return sum(after > before for before, after in itertools.pairwise(needed))


@usage_errors()
def main(
    out: Out,
    network: Annotated[str, typer.Option(help="As in experiments.bench.fit.")] = "lm",
    target: Annotated[str, typer.Option(help=TARGET_HELP)] = "h100",
) -> None:
    """Fit each budget; write budgets.json and budgets.md after every row."""
    make_folder(out)
    plain = compiled(network, target, "plain").total_bytes
    assert plain is not None
    rows: list[dict[str, Any]] = []
    for fraction in FRACTIONS:
        budget = int(fraction * plain)
        row = {"fraction": fraction, "budget_bytes": budget} | fitted(network, target, budget)
        rows.append(row)
        environment = describe_environment()
        content = {"network": network, "target": target, "plain_bytes": plain, "rows": rows}
        write_json(out / "budgets.json", environment | content)
        title = f"{network} on {target}; the memory rises {rises(rows)} times as the budget falls:"
        write_table(out / "budgets.md", title, [HEADER, *map(cells, rows)], environment["command"])
        typer.echo(" | ".join(cells(row)))


if __name__ == "__main__":
    typer.run(main)
