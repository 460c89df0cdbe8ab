r"""Compares stock networks compressed by one argument: memory, HBM traffic and compile time.

    python -m experiments.bench.zoo --out experiments/results/zoo
    python -m experiments.bench.zoo --network unet --way plain --way quantize:bits=2 --out OUT

`experiments/zoo` has the networks and the steps, `experiments/zoo/scenarios` whole training codes.
The steps are compiled ahead of time; nothing is run. Each row has a process of its own, which is
ended at the limit of time. Activations are the bytes that a step needs besides its arguments.
`--way remat+automatic` is for a network whose blocks are under `jax.checkpoint`, as an author wrote
them. `--way fit:0.9` is what `jc.fit` chooses for this part of the device's memory. Times are of
one compilation without a cache; compare them within one run only.
"""

import contextlib
import dataclasses
import multiprocessing
import os
import resource
import signal
import time
from multiprocessing.connection import Connection
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
from experiments.zoo.scenarios.all import SCENARIOS
from experiments.zoo.scenarios.scenario import Scenario
from experiments.zoo.steps import NETWORKS
from jaxcomp.memory._analyze import analyze_step
from jaxcomp.memory._targets import Target, resolve
from jaxcomp.memory._tracing import trace
from jaxcomp.models._network import Network
from jaxcomp.planning import FittedPlan, Strategy, fit
from jaxcomp.planning._fit import ACTIONS

STEPS: dict[str, Network | Scenario] = {**NETWORKS, **SCENARIOS}
_FIT = "fit:"
WAYS = ("plain", "remat", "accumulate:4", "automatic")
SECONDS = ("trace_seconds", "lower_seconds", "compile_seconds")
KEY = ("network", "target", "row")
HEADER = (
    "network",
    "batch",
    "target",
    "row",
    "needs MiB",
    "arguments MiB",
    "activations MiB",
    "/ plain",
    "HBM traffic MiB",
    "/ plain",
    "estimate, ms",
    "/ plain",
    "trace, lower and compile, s",
    "/ plain",
)


def of_way(way: str) -> Strategy:
    """Returns the strategy of a row; after "remat+", with blocks under `jax.checkpoint`."""
    spec = way.removeprefix("remat+")
    strategy = Strategy.parse(spec)
    return strategy if spec == way else dataclasses.replace(strategy, remat=True)


def fitted(network: str, where: Target, budget: int, batch: int) -> FittedPlan:
    """Returns what `jc.fit` chooses for a step, of so many bytes of the device's memory."""
    actions = [action for action in ACTIONS if action != "accumulate"]
    make_step = STEPS[network].make_step
    return fit(make_step, batch=batch, budget=budget, target=where.name, actions=actions)


def measure(network: str, target: str, way: str, batch: int) -> dict[str, Any]:
    """Compiles a step, and returns its figures and the seconds of each stage."""
    jax.config.update("jax_enable_compilation_cache", False)
    where = resolve(target)
    budget = plan = None
    if way.startswith(_FIT):
        assert where.capacity_bytes is not None
        budget = int(float(way.removeprefix(_FIT)) * where.capacity_bytes)
        plan = fitted(network, where, budget, batch)
    strategy = of_way(way) if plan is None else plan.strategy
    start = time.perf_counter()
    step, arguments = STEPS[network].make_step(strategy, batch)
    traced = trace(step, *arguments, target=where)
    traced_at = time.perf_counter()
    traced.traced.lower(lowering_platforms=(where.platform,))
    seconds = {
        "trace_seconds": traced_at - start,
        "lower_seconds": time.perf_counter() - traced_at,
    }
    report = analyze_step(traced, where, budget, xla_remat=True).report
    figures = dataclasses.asdict(report)
    total, given = report.total_bytes, report.argument_bytes
    figures["activation_bytes"] = None if total is None or given is None else total - given
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu_seconds = sum(usage.ru_utime + usage.ru_stime for usage in used)
    chosen = {} if plan is None else {"chosen": plan.name}
    return figures | seconds | chosen | {"cpu_seconds": cpu_seconds, "error": None}


def in_own_process(limit: float, *arguments: Any) -> dict[str, Any]:
    """Calls `measure` in a process group of its own, which is ended at the limit of seconds."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, *arguments))
    process.start()
    theirs.close()
    try:
        if not ours.poll(limit):
            return {"error": f"not compiled within {limit:.0f} s"}
        return ours.recv()
    except EOFError:
        process.join()
        return {"error": f"the process ended with status {process.exitcode}"}
    finally:
        if process.pid is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, or makes no group yet
                os.killpg(process.pid, signal.SIGKILL)  # its compiler's process, too
        process.kill()
        process.join()


def _answer(connection: Connection, *arguments: Any) -> None:
    os.setsid()
    try:
        connection.send(measure(*arguments))
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        connection.send({"error": f"{type(error).__name__}: {lines[0]}"})


def cells(row: dict[str, Any], plain: dict[str, Any] | None) -> list[str]:
    """A row of the table, with ratios to the plain step of the same network and target."""
    way = f"{row['row']}: {row['chosen']}" if "chosen" in row else row["row"]
    name = [row["network"], str(row["batch"]), row["target"], way]
    if row["error"]:
        return [*name, f"failed: {row['error'][:160]}", *[""] * (len(HEADER) - 5)]

    def mebibytes(figure: str) -> str:
        return "" if row[figure] is None else f"{row[figure] / 2**20:,.0f}"

    def ratio(figure: str) -> str:
        known = plain is not None and not plain["error"] and plain[figure]
        return f"{row[figure] / known:.2f}" if known and row[figure] is not None else ""

    estimate = row["estimated_seconds"]
    return [
        *name,
        mebibytes("total_bytes"),
        mebibytes("argument_bytes"),
        mebibytes("activation_bytes"),
        ratio("activation_bytes"),
        mebibytes("hbm_traffic_bytes"),
        ratio("hbm_traffic_bytes"),
        "" if estimate is None else f"{1e3 * estimate:,.1f}",
        ratio("estimated_seconds"),
        "" if row["seconds"] is None else f"{row['seconds']:.0f}",
        ratio("seconds"),
    ]


@usage_errors()
def main(
    out: Out,
    target: Annotated[
        list[str] | None, typer.Option(help=f"{TARGET_HELP} Repeatable. Default: h100.")
    ] = None,
    network: Annotated[
        list[str] | None,
        typer.Option(help=f"Repeatable. Default: all of {', '.join(STEPS)}."),
    ] = None,
    way: Annotated[
        list[str] | None,
        typer.Option(help=f"A strategy; repeatable. Default: {', '.join(WAYS)}."),
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Default: that of the network.")] = None,
    limit: Annotated[float, typer.Option(help="Seconds after which a row is given up.")] = 1800,
    add: Add = False,
) -> None:
    """Compile each step; write zoo.json and zoo.md after every row."""
    make_folder(out)
    unknown = sorted({*(network or ())} - {*STEPS})
    if unknown:
        raise ValueError(f"network={unknown}: expected some of {sorted(STEPS)}")
    ways, targets = way or list(WAYS), target or ["h100"]
    for name in targets:
        resolve(name)
    for spec in ways:
        if not spec.startswith(_FIT):
            of_way(spec)
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    if add:
        found = read_table(out / "zoo.json", {})["rows"]
        rows = {tuple(row[part] for part in KEY): row for row in found}
    text = ""
    for network_name in network or STEPS:
        size = batch or STEPS[network_name].batch
        for target_name in targets:
            for spec in ways:
                key = network_name, target_name, spec
                figures = in_own_process(limit, network_name, target_name, spec, size)
                if not figures["error"]:
                    parts = [figures[stage] for stage in SECONDS]
                    figures["seconds"] = None if None in parts else sum(parts)
                rows.pop(key, None)
                environment = describe_environment()
                code = {"code": environment["code"], "date": environment["date"]}
                rows[key] = dict(zip(KEY, key, strict=True)) | {"batch": size} | figures | code
                if flags := os.environ.get("XLA_FLAGS"):
                    environment["command"] = f"XLA_FLAGS={flags!r} {environment['command']}"
                write_json(out / "zoo.json", environment | {"rows": [*rows.values()]})
                table = [
                    cells(row, rows.get((row["network"], row["target"], "plain")))
                    for row in rows.values()
                ]
                title = "Whole training steps of stock networks, bfloat16:"
                text = write_table(out / "zoo.md", title, [HEADER, *table], environment["command"])
                typer.echo(" | ".join(table[-1]))
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)
