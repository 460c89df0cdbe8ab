"""Rows of a table, read from a record."""

import dataclasses
import functools
import itertools
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import experiments
from experiments.comparison.paired import difference

RESULTS = Path(experiments.__file__).parent / "results"

Values = Mapping[str, Any]
Reader = Callable[[Values], list[dict[str, Any]]]

# Rows that are compared with the plain row have the same values of these.
_STEP = "network", "model", "target", "case", "block", "steps", "draws"


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        name: The strategy, as the record names it.
        values: The figures of the record.
        plain: Those of the plain row of the same step. Empty if there is none.
    """

    name: str
    values: Values
    plain: Values


@functools.cache
def load(record: str) -> Values:
    """Reads a record, such as "zoo/zoo.json", or that of earlier code if there is no other."""
    found = RESULTS / record
    path = found if found.exists() else RESULTS / "archive" / record
    content: dict[str, Any] = json.loads(path.read_text())
    return content | {"earlier": path != found}


def read(record: str, reader: Reader, where: Values) -> list[Row]:
    """Returns the rows of a record whose figures include those of `where`."""
    found = reader(load(record))

    def name(values: Values) -> str:
        return str(values["row"] if "row" in values else values["strategy"])

    def plain_of(values: Values) -> Values:
        for other in found:
            same = all(other.get(key) == values.get(key) for key in _STEP)
            if same and name(other) == "plain":
                return other
        return {}

    rows = [Row(name(values), values, plain_of(values)) for values in found]
    networks = list(dict.fromkeys(row.values.get("network") for row in rows))
    rows.sort(key=lambda row: networks.index(row.values.get("network")))  # added rows are last
    return [row for row in rows if where.items() <= row.values.items()]


def as_they_are(content: Values) -> list[dict[str, Any]]:
    """The rows of a record, whose figures lie side by side."""
    rows: list[dict[str, Any]] = content["rows"]
    return rows


def adapters(content: Values) -> list[dict[str, Any]]:
    """Rows of bench.lora with the figures at 8,192 tokens."""
    return [
        row | row["points"].get("8192", {}) | {"fits": row["longest"] >= 8192}
        for row in content["rows"]
    ]


def networks(content: Values) -> list[dict[str, Any]]:
    """Rows of bench.methods with the figures of the stock network and of that of jaxcomp.models."""
    return [
        {"network": row["network"], "row": row["row"]}
        | {
            f"{kind}_{key}": figure
            for kind in ("stock", "own")
            for key, figure in {
                **row[kind],
                "activation_bytes": row[kind]["total_bytes"] - row[kind]["argument_bytes"],
            }.items()
        }
        for row in content["rows"]
    ]


def compile_times(content: Values) -> list[dict[str, Any]]:
    """Rows of bench.compile_time with the median seconds of each stage and of their sum."""
    stages = "trace", "lower", "xla"
    return [
        {key: row[key] for key in ("network", "target", "row")}
        | {stage: statistics.median(r[stage] for r in row["rounds"]) for stage in stages}
        | {"sum": statistics.median(sum(r[s] for s in stages) for r in row["rounds"])}
        | {"kernels": row["rounds"][-1]["kernels"]}
        for row in content["rows"]
    ]


def seeds(content: Values) -> list[dict[str, Any]]:
    """One row for each strategy of reproduce.accuracy: means, and differences of equal seeds."""
    runs: dict[str, dict[int, Values]] = {}
    for run in content["rows"]:
        runs.setdefault(run["strategy"], {})[run["seed"]] = run
    rows = []
    for name, by_seed in runs.items():
        row: dict[str, Any] = {"row": name, "seeds": len(by_seed)}
        for key, unit, digits in (("test_accuracy", 100, 2), ("test_loss", 1, 4)):
            figures = [unit * run[key] for run in by_seed.values()]
            others = [unit * runs["plain"][seed][key] for seed in by_seed]
            row[key] = statistics.fmean(figures)
            row[f"{key}_difference"] = (
                "" if name == "plain" else difference(figures, others, digits)
            )
        rows.append(row)
    return rows


def trained(content: Values) -> list[dict[str, Any]]:
    """Rows of comparison.compare: mean and deviation of the accuracies, and a step that ran."""
    figures = "declared_residual_bytes", "temp_bytes", "step_time_ratio"
    runs = {row["strategy"]: [100 * a for a in row["test_accuracy"]] for row in content["rows"]}
    return [
        {"row": row["strategy"], "accuracy": spread(runs[row["strategy"]], 2)}
        | {"accuracy_difference": _paired(runs, row["strategy"])}
        | {key: row["measurement"][key] for key in figures}
        for row in content["rows"]
    ]


def _paired(runs: Mapping[str, list[float]], name: str) -> str:
    """The difference of runs from the plain ones of the same seeds; nothing of single runs."""
    if name == "plain" or len(runs[name]) < 2:
        return ""
    return difference(runs[name], runs["plain"])


def texts(content: Values) -> list[dict[str, Any]]:
    """One row for each strategy of reproduce.transformers, with differences of equal seeds."""
    keys = {"validation_loss": (1, 4), "validation_accuracy": (100, 2)}
    rows = []
    for name, runs in content["runs"].items():
        row: dict[str, Any] = {"row": name, "temp_bytes": runs[0]["temp_bytes"]}
        row["declared_bytes"] = runs[0]["declared_bytes"]
        for key, (unit, digits) in keys.items():
            if runs[0][key] is None:
                continue
            figures = [unit * run[key] for run in runs]
            others = [unit * run[key] for run in content["runs"]["plain"]]
            row[key] = spread(figures, digits)
            row[f"{key}_difference"] = (
                "" if name == "plain" else difference(figures, others, digits)
            )
        rows.append(row)
    return rows


def spread(figures: Sequence[float], digits: int) -> str:
    """The mean and the standard deviation of some runs; the figure itself of one run.

    Example:
        >>> spread([70.0, 72.0], 1)
        '71.0 ± 1.4'
    """
    mean = f"{statistics.fmean(figures):.{digits}f}"
    return f"{mean} ± {statistics.stdev(figures):.{digits}f}" if len(figures) > 1 else mean


def largest_batches(content: Values) -> list[dict[str, Any]]:
    """Rows of bench.fits with the largest batch of each device."""
    return [
        {"row": row["row"], "model": content["model"], "target": ", ".join(row["largest_batch"])}
        | row["largest_batch"]
        for row in content["rows"]
    ]


def operations(content: Values) -> list[dict[str, Any]]:
    """Rows of bench.gates with compiled over declared bytes."""
    return [
        row | {"row": row["codec"], "over": row["alive_bytes"] / row["declared_bytes"]}
        for row in content["rows"]
    ]


def fitted(content: Values) -> list[dict[str, Any]]:
    """Rows of bench.fit: what a budget's plan takes beside the fastest strategy by hand."""
    rows = []
    for row in content["rows"]:
        plan = json.loads(row["plan"]) if row.get("plan") else {}
        hand, took = min(row["by_hand"].items(), key=lambda item: item[1], default=("", None))
        chosen = (plan["name"] if plan["policy"] else plan["spec"]) if plan else "nothing fits"
        figures = {"chosen_plan": chosen, "milliseconds": plan.get("milliseconds")}
        over = plan["milliseconds"] / took if plan and took else None
        rows.append(row | figures | {"row": chosen, "hand": hand or "none fits", "over": over})
    return rows


def budgets(content: Values) -> list[dict[str, Any]]:
    """Rows of bench.budgets, also those where nothing fits."""
    return [
        row | {"row": row.get("chosen", ""), "chosen_plan": row.get("chosen", "nothing fits")}
        for row in content["rows"]
    ]


def features(content: Values) -> list[dict[str, Any]]:
    """Rows of reproduce.pooling: networks beside the exact one of the same seed."""
    rows = []
    for name, runs in content["against_plain"].items():
        layers = {"stem": 0, "middle": len(runs[0]["alignment"]) // 2, "last": -1}
        row = {key: spread([r["alignment"][i] for r in runs], 3) for key, i in layers.items()}
        overlap = spread([run["grad_cam_overlap"] for run in runs], 3)
        rows.append({"row": name, **row, "overlap": overlap})
    return rows


def kinds_of_kernels(content: Values) -> list[dict[str, Any]]:
    """Rows of bench.kernels: all kernels of a kind."""
    return [
        total
        | {"model": content["model"], "kernel": total["kind"]}
        | {"over": total["milliseconds"] / (total["milliseconds_of_bytes"] or math.nan)}
        for total in content["totals"]
    ]


def instructions_of(kernels: Mapping[str, str]) -> Reader:
    """Returns a reader of bench.instructions: instructions for each element of some kernels.

    Args:
        kernels: XLA's names of kernels of the last step, each with what the kernel does.
    """

    def read(content: Values) -> list[dict[str, Any]]:
        found = {kernel["name"]: kernel for kernel in content["rows"][-1]["kernels"]}
        return [
            {"row": does, "instructions": sum(found[kernel]["classes"].values())}
            for kernel, does in kernels.items()
        ]

    return read


def faults(content: Values) -> list[dict[str, Any]]:
    """Rows of checks.faults: how often a fault was tried. The command fails if one is not told."""
    tried = {key: found for key, found in content.items() if isinstance(found, list)}
    return [
        {"row": fault, "tried": len(found)} for fault, found in tried.items() if fault != "devices"
    ]


def audits(content: Values) -> list[dict[str, Any]]:
    """Rows of checks.fit_audit: the plans of a step at all budgets, and how near they come."""
    rows = []
    for step in content["steps"]:
        plans = [b for b in step["budgets"] if b["plan"] is not None]
        peaks = [b["bytes_again"] for b in plans]
        slowest = [
            plan["fastest_ms"] / min(within)
            for plan in plans
            if (within := _milliseconds_within(plan["budget_bytes"], step["all_choices"]))
        ]
        rows.append(
            {"row": f"{step['network']}, {step['depth']} blocks", "target": step["target"]}
            | {"budgets": len(step["budgets"]), "plans": len(plans)}
            | {"fit": sum(b["bytes_again"] <= b["budget_bytes"] for b in plans)}
            | {"rises": sum(after > before for before, after in itertools.pairwise(peaks))}
            | {"choices": len(step["all_choices"]) or "", "slowest": max(slowest, default=None)}
        )
    return rows


def _milliseconds_within(budget: int, found: Sequence[Values]) -> list[float]:
    return [values["milliseconds"] for values in found if values["total_bytes"] <= budget]


def heads(content: Values) -> list[dict[str, Any]]:
    """Rows of bench.head: ways to compute the loss from the last hidden states."""
    return [{"row": name, **figures} for name, figures in content["rows"].items()]


def products(content: Values) -> list[dict[str, Any]]:
    """One row for each matrix, block and density of bench.block_sparse; a figure per product."""
    rows: dict[tuple[str, str, float], dict[str, Any]] = {}
    for row in content["rows"]:
        height, width = row["block"]
        block = f"{height} x {width}"
        key = row["matrix"], block, row["density"]
        found = rows.setdefault(
            key, {"row": block, "matrix": row["matrix"], "density": row["density"]}
        )
        found[f"{row['product']} traffic"] = row["hbm_traffic_bytes"]
        found[f"{row['product']} time"] = row.get("time_over_dense")
    return list(rows.values())


def noise(content: Values) -> list[dict[str, Any]]:
    """Rows of bench.gradients with the bias and its interval."""
    return [
        row
        | {"bias": row["coded"]["bias"], "low": row["coded"]["bias_interval"][0]}
        | {"high": row["coded"]["bias_interval"][1]}
        for row in content["rows"]
    ]


def distances(content: Values) -> list[dict[str, Any]]:
    """Rows of bench.limit: the codes that are not far above the limit."""
    return [row for row in content["rows"] if row["distance"] < 100 and row["bits"] > 1.9]


def subspaces(content: Values) -> list[dict[str, Any]]:
    """Rows of bench.limit: subspaces of the inputs of products, beside 1 and 2 bits with dither."""
    codes = (
        "subspace",
        *(f"Quantize(bits={bits}, group='channel', rounding='dit" for bits in "12"),
    )
    inputs = [row for row in content["rows"] if row["kind"] == "inputs of products"]
    return [row for row in inputs if row["row"].startswith(codes)]


def named(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """Returns the rows with these names, in their order.

    Raises:
        ValueError: If a row is missing.
    """
    if missing := set(names) - {row.name for row in rows}:
        raise ValueError(f"rows {sorted(missing)} are not in the record")
    return [row for name in names for row in rows if row.name == name]
