r"""Fits training steps to budgets of memory, beside the strategies that one would pick by hand.

    python -m experiments.bench.fit --out experiments/results/fit
    python -m experiments.bench.fit --network vit_b16 --target h100 --fraction 0.5 --out OUT

Budgets are fractions of what the plain step needs. Each returned plan is compiled again in a
process of its own. All steps are compiled ahead of time; nothing is run. The estimate is that of
`jc.fit`. Seconds of later budgets are without the steps that an earlier one compiled.
"""

import concurrent.futures
import multiprocessing
import time
from pathlib import Path
from typing import Annotated, Any

import jax
import typer

from experiments.common.options import TARGET_HELP, Add, Out, usage_errors
from experiments.common.record import (
    describe_environment,
    make_folder,
    read_table,
    write_json,
    write_table,
)
from experiments.zoo import transformers
from experiments.zoo.steps import NETWORKS
from jaxcomp.memory._analyze import analyze_step
from jaxcomp.memory._compiling import CompileError
from jaxcomp.memory._report import MemoryReport
from jaxcomp.memory._targets import resolve
from jaxcomp.models import _lm, steps
from jaxcomp.planning import DoesNotFitError, FittedPlan, MakeStep, Strategy, fit
from jaxcomp.planning._probe import seconds_of
from jaxcomp.planning._watched import trace_step

FRACTIONS = (0.8, 0.5, 0.35, 0.25)
BY_HAND = (
    "plain",
    "remat",
    "remat:dots",
    "remat:weights",
    "exact",
    "accumulate:4",
    "automatic",
    "automatic:bits=3",
    "quantize:bits=4",
    "quantize:bits=2",
)
OWN: dict[str, tuple[MakeStep, int]] = {
    "resnet50": (steps.classifier("resnet50"), 256),
    "resnet152": (steps.classifier("resnet152"), 128),
    "resmlp_s24": (steps.classifier("resmlp_s24"), 128),
    "lm": (_lm.lm, 8),
    "long_lm": (transformers.long_lm, 1),
}
STOCK = ("vit_b16", "resnet50_nnx")
HEADER = (
    "network",
    "batch",
    "target",
    "budget / plain",
    "budget MiB",
    "chosen",
    "needs MiB",
    "estimate, ms",
    "best by hand",
    "its estimate, ms",
    "/ by hand",
    "compilations",
    "error of the estimated bytes",
    "s",
    "estimated from",
)
# Rows of earlier runs are estimated from traffic and products.
ESTIMATED_FROM = "traffic, products, elementwise operations, kernels"


def factory(network: str) -> tuple[MakeStep, int]:
    """The step factory of a network, and its batch size."""
    if network in OWN:
        return OWN[network]
    return NETWORKS[network].make_step, NETWORKS[network].batch


def compiled(network: str, target: str, spec: str) -> MemoryReport:
    """The memory of a network's step with a strategy, whether or not the target has as much."""
    make_step, batch = factory(network)
    where = resolve(target)
    strategy = Strategy.parse(spec)
    traced, _ = trace_step(make_step, strategy, batch, where)
    xla_remat = where.platform == "tpu" or not strategy.is_plain
    return analyze_step(traced, where, None, xla_remat).report


def by_hand(network: str, target: str) -> dict[str, tuple[int, float]]:
    """Bytes and estimated milliseconds of the strategies that one would pick by hand."""
    where = resolve(target)
    found: dict[str, tuple[int, float]] = {}
    for spec in BY_HAND:
        try:
            report = compiled(network, target, spec)
        except (ValueError, TypeError, CompileError) as error:
            typer.echo(f"{network} {target} {spec}: {str(error).splitlines()[0][:120]}")
            continue
        if report.total_bytes is not None and report.temp_bytes is not None:
            found[spec] = report.total_bytes, 1e3 * seconds_of(report, where)
    return found


def again(network: str, target: str, plan: str) -> int | None:
    """The bytes of a plan, compiled from its JSON text and not read from a cache."""
    jax.config.update("jax_enable_compilation_cache", False)
    make_step, batch = factory(network)
    return FittedPlan.from_json(plan).verify(make_step, batch=batch, target=target).total_bytes


def fitted(network: str, target: str, fraction: float, rows: dict[str, Any]) -> dict[str, Any]:
    """Fits a budget; compiles the plan again in a new process."""
    make_step, batch = factory(network)
    budget = int(fraction * rows["plain"][0])
    row: dict[str, Any] = {
        "network": network,
        "batch": batch,
        "target": target,
        "fraction": fraction,
        "budget_bytes": budget,
        "by_hand": {s: ms for s, (total, ms) in rows.items() if total <= budget},
        "error": None,
        "estimated_from": ESTIMATED_FROM,
    }
    start = time.perf_counter()
    try:
        plan = fit(make_step, batch=batch, budget=budget, allowance=0, target=target)
    except DoesNotFitError as error:
        return row | {"error": str(error), "seconds": time.perf_counter() - start}
    row["seconds"] = time.perf_counter() - start
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        total = pool.submit(again, network, target, plan.to_json()).result()
    return row | {"plan": plan.to_json(), "total_bytes": total, "fits": (total or 0) <= budget}


def name_of(plan: FittedPlan) -> str:
    """What was chosen: a plan by its number, a named strategy by its spec."""
    return plan.name if plan.policy is not None else plan.spec


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    first = [
        row["network"],
        str(row["batch"]),
        row["target"],
        f"{row['fraction']:.2f}",
        f"{row['budget_bytes'] / 2**20:,.0f}",
    ]
    hand = min(row["by_hand"].items(), key=lambda item: item[1], default=("none fits", None))
    its = "" if hand[1] is None else f"{hand[1]:.2f}"
    last = f"{row['seconds']:.0f}", row["estimated_from"]
    if row["error"]:
        return [*first, "nothing fits", "", "", hand[0], its, "", "", "", *last]
    plan = FittedPlan.from_json(row["plan"])
    ratio = "" if hand[1] is None else f"{plan.milliseconds / hand[1]:.3f}"
    return [
        *first,
        name_of(plan),
        f"{row['total_bytes'] / 2**20:,.0f}" + ("" if row["fits"] else " (does not fit)"),
        f"{plan.milliseconds:.2f}",
        hand[0],
        its,
        ratio,
        str(len(plan.frontier)),
        ", ".join(f"{100 * error:+.1f}%" for error in plan.errors),
        *last,
    ]


@usage_errors()
def main(
    out: Out,
    network: Annotated[
        list[str] | None,
        typer.Option(help=f"Repeatable. Default: {', '.join((*OWN, *STOCK))}."),
    ] = None,
    target: Annotated[
        list[str] | None, typer.Option(help=f"{TARGET_HELP} Repeatable. Default: h100.")
    ] = None,
    fraction: Annotated[
        list[float] | None, typer.Option(help="Of the plain step's bytes; repeatable.")
    ] = None,
    add: Add = False,
) -> None:
    """Fit each budget; write fit.json, fit.md and a picture after every row."""
    make_folder(out)
    names = network or [*OWN, *STOCK]
    if unknown := sorted({*names} - {*OWN, *NETWORKS}):
        raise ValueError(f"network={unknown}: expected some of {sorted({*OWN, *NETWORKS})}")
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    if add:
        found = read_table(out / "fit.json", {})["rows"]
        rows = {(row["network"], row["target"], row["fraction"]): row for row in found}
    for name in names:
        for target_name in target or ["h100"]:
            hand = by_hand(name, target_name)
            for part in fraction or FRACTIONS:
                row = fitted(name, target_name, part, hand)
                rows[name, target_name, part] = row
                write(out, list(rows.values()))
                if not row["error"]:
                    picture = out / f"{name}-{target_name}-{part}.png"
                    FittedPlan.from_json(row["plan"]).draw(picture)
                typer.echo(" | ".join(cells(row)))


def write(out: Path, rows: list[dict[str, Any]]) -> None:
    """Writes the figures and the table."""
    environment = describe_environment()
    write_json(out / "fit.json", environment | {"rows": rows})
    title = "Training steps fitted to budgets of memory, as compiled:"
    table = [HEADER, *map(cells, rows)]
    write_table(out / "fit.md", title, table, environment["command"])


if __name__ == "__main__":
    typer.run(main)
