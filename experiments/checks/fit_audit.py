r"""Audits `fit`: random small steps at random budgets, every plan compiled again.

    python -m experiments.checks.fit_audit --out experiments/results/fit-audit

A step is a small network of the zoo, for a random device. It is fitted to nine budgets. A process
of its own compiles the plans again, from their JSON text. Of the first steps all choices for all
groups of modules are compiled, too. Nothing is run: bytes are those of XLA, and times are estimates
of `jc.fit`. The command fails if a plan does not fit, if a smaller budget has a higher peak, or if
the fastest step that `fit` finds takes 2% more than the fastest of all choices. A command that was
ended goes on after the steps in its file.
"""

import concurrent.futures
import itertools
import json
import multiprocessing
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.progress import track

from experiments.common.options import Out, usage_errors
from experiments.common.record import describe_environment, make_folder, write_json, write_table
from experiments.zoo import gpt2, llama, resmlp, resnet_nnx
from experiments.zoo.steps import bf16, tokens
from jaxcomp.memory._analyze import analyze_step
from jaxcomp.memory._targets import resolve
from jaxcomp.models import _vit
from jaxcomp.models._network import ADAMW, Network, images, of_linen, of_nnx
from jaxcomp.planning import DoesNotFitError, FittedPlan, MakeStep, Strategy, fit
from jaxcomp.planning._fit import ACTIONS, BITS
from jaxcomp.planning._groups import Groups, block_of, policy_of
from jaxcomp.planning._probe import declared_bytes, seconds_of, trace_scoped
from jaxcomp.planning._watched import trace_step

BUDGETS = 9  # of each step
TARGETS = ["cpu", "cpu", "cpu", "h100"]
OF_BUDGET = 0.05  # a group outside of the blocks that saves less of all is kept
CLOSE = 1.02
CODE = "bits=4"


def set_up() -> None:
    """As the tests are: machine code for CPUs is not optimized; its buffers are the same."""
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))


def network(name: str, depth: int, width: int) -> Network:
    """A small network."""
    image: dict[str, Any] = dict(shape=(64, 64, 3), optimizer=ADAMW)
    if name == "resmlp":
        make = bf16(resmlp.ResMLP, depth=depth, features=width, patch=8, size=64)
        return images(of_nnx, make, **image)
    if name == "vit":
        make = bf16(_vit.VisionTransformer, hidden=width, depth=depth, heads=4, image=64, patch=8)
        return images(of_nnx, make, **image)
    if name == "resnet":
        blocks = (depth - depth // 2, depth // 2)
        make = bf16(resnet_nnx.ResNet, block=resnet_nnx.BasicBlock, layers=blocks)
        return images(of_nnx, make, **image)
    sizes = dict(vocabulary=256, width=width, depth=depth, heads=4)
    if name == "gpt2":
        return tokens(of_nnx, bf16(gpt2.GPT2, context=128, **sizes), length=128)
    return tokens(of_linen, bf16(llama.Llama, kv_heads=2, hidden=2 * width, **sizes), length=128)


def drawn(
    number: int, seed: int, targets: Sequence[str], depth: int, small: bool
) -> dict[str, Any]:
    """Draws a step: its network, device, budgets, and what a plan may do.

    All choices are compiled of a small one, so they are few. Small ones take the targets in turn.
    """
    draw = random.Random(f"{seed} {number}")
    names = ["resmlp", "resnet"] if small else ["resmlp", "vit", "resnet", "gpt2", "llama"]
    return {
        "number": number,
        "network": names[number % len(names)],
        "depth": depth,
        "width": draw.choice([64, 128, 256]),
        "batch": draw.choice([64, 128, 256]),
        "target": targets[(number + 1) % len(targets)] if small else draw.choice(targets),
        "parts": sorted((round(draw.uniform(0.3, 1), 3) for _ in range(BUDGETS)), reverse=True),
        "actions": ["keep", "quantize", "recompute"] if small else list(ACTIONS),
        "bits": [4] if small else list(BITS),
    }


def factory(step: Mapping[str, Any]) -> MakeStep:
    """The step factory of what was drawn."""
    return network(step["network"], step["depth"], step["width"]).make_step


def compiled(step: Mapping[str, Any], strategy: Strategy) -> tuple[int, int, float]:
    """Bytes of a step and of its arguments, and its estimated milliseconds."""
    target = resolve(step["target"])
    traced, _ = trace_step(factory(step), strategy, step["batch"], target)
    xla_remat = target.platform == "tpu" or not strategy.is_plain
    report = analyze_step(traced, target, None, xla_remat).report
    return report.total_bytes or 0, report.argument_bytes or 0, 1e3 * seconds_of(report, target)


def choices(step: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """All choices for all groups of modules; the modules of a block are recomputed together."""
    plain = Strategy.parse("plain")
    traced, models = trace_scoped(factory(step), plain, step["batch"], resolve(step["target"]))
    declared = declared_bytes(traced, Groups.of(models, traced))
    parts: dict[str, list[str]] = {}
    for group in declared:
        parts.setdefault(block_of(group) or group, []).append(group)
    options = []
    for part, groups in parts.items():
        is_small = sum(map(declared.__getitem__, groups)) < OF_BUDGET * sum(declared.values())
        kinds = ["keep"] if is_small and not block_of(part) else ["keep", CODE]
        of_groups = [*itertools.product(kinds, repeat=len(groups))]
        of_groups += [("recompute",) * len(groups)] * bool(block_of(part))
        options.append([dict(zip(groups, names, strict=True)) for names in of_groups])
    for chosen in itertools.product(*options):
        yield {group: name for of_part in chosen for group, name in of_part.items()}


def again(step: Mapping[str, Any], plan: str) -> int | None:
    """The bytes of a plan, compiled from its JSON text and not read from a cache."""
    jax.config.update("jax_enable_compilation_cache", False)
    return FittedPlan.from_json(plan).verify(factory(step)).total_bytes


def fitted(step: Mapping[str, Any], budget: int) -> dict[str, Any]:
    """Fits a budget."""
    start = time.perf_counter()
    allowed = {"actions": step["actions"], "bits": step["bits"], "target": step["target"]}
    row: dict[str, Any] = {"budget_bytes": budget}
    try:
        plan = fit(factory(step), batch=step["batch"], budget=budget, allowance=0, **allowed)
    except DoesNotFitError as error:
        row |= {"plan": None, "error": str(error)}
    else:
        fastest = min(c.milliseconds for c in plan.frontier if c.fits)
        row |= {"plan": json.loads(plan.to_json()), "fastest_ms": fastest}
    return row | {"seconds": round(time.perf_counter() - start, 1)}


def audited(step: dict[str, Any], small: bool) -> dict[str, Any]:
    """Fits the budgets of a step, compiles the plans again, and all choices of a small one."""
    total, given, _ = compiled(step, Strategy.parse("plain"))
    rows = [fitted(step, given + int(part * (total - given))) for part in step["parts"]]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context, initializer=set_up) as pool:
        for row in rows:
            if row["plan"] is not None:
                text = json.dumps(row["plan"])
                row["bytes_again"] = pool.submit(again, step, text).result()
    found: list[dict[str, Any]] = []
    if small:
        for chosen in choices(step):
            needed, _, took = compiled(step, Strategy.of(policy_of(chosen, biased=False)))
            found.append({"choices": chosen, "total_bytes": needed, "milliseconds": took})
    return step | {"plain_bytes": total, "budgets": rows, "all_choices": found}


def defects(step: Mapping[str, Any]) -> list[str]:
    """What is wrong with the plans of a step."""
    found = []
    before = None
    for row in step["budgets"]:
        of = f"{step['number']} {step['network']} {step['target']} {row['budget_bytes']}"
        fitting = [c for c in step["all_choices"] if c["total_bytes"] <= row["budget_bytes"]]
        best = min((c["milliseconds"] for c in fitting), default=None)
        if row["plan"] is None:
            found += [f"{of}: nothing found, but {best:.3f} ms fit"] if best else []
            continue
        if row["bytes_again"] > row["budget_bytes"]:
            found.append(f"{of}: the plan needs {row['bytes_again']}")
        if before is not None and row["bytes_again"] > before:
            found.append(f"{of}: the peak rises from {before} to {row['bytes_again']}")
        if best is not None and row["fastest_ms"] > CLOSE * best:
            found.append(f"{of}: {row['fastest_ms']:.3f} ms, but {best:.3f} ms fit")
        before = row["bytes_again"]
    return found


def write(out: Path, steps: list[dict[str, Any]]) -> None:
    """Writes the figures and what is wrong."""
    environment = describe_environment()
    write_json(out / "fit_audit.json", environment | {"steps": steps})
    table = [["defect"], *([defect] for step in steps for defect in defects(step))]
    title = f"{len(steps)} steps, {sum(len(s['budgets']) for s in steps)} budgets, as compiled:"
    write_table(out / "fit_audit.md", title, table, environment["command"])


@usage_errors()
def main(
    out: Out,
    count: Annotated[int, typer.Option("--steps", help="Number of steps.")] = 12,
    seed: Annotated[int, typer.Option(help="Seed of what is drawn.")] = 0,
    target: Annotated[list[str], typer.Option(help="Drawn for each step; repeatable.")] = TARGETS,
    depth: Annotated[int, typer.Option(help="Number of blocks of a network.")] = 2,
    small: Annotated[int, typer.Option(help="First steps of which all choices compile.")] = 4,
) -> None:
    """Fit the budgets of random steps; exit with 1 if a plan has a defect."""
    set_up()
    make_folder(out)
    file = out / "fit_audit.json"
    steps: list[dict[str, Any]] = json.loads(file.read_text())["steps"] if file.exists() else []
    for number in track(range(len(steps), count), "fitting"):
        is_small = number < small
        steps.append(audited(drawn(number, seed, target, depth, is_small), is_small))
        write(out, steps)
        jax.clear_caches()
    found = [defect for step in steps for defect in defects(step)]
    typer.echo("\n".join([*found, f"{len(found)} defects"]))
    if found:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
