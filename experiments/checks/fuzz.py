"""Checks random programs, as `make test` does a few, and reduces those that fail.

    python -m experiments.checks.fuzz --programs 2000 --out build/fuzz

`tests/fuzz` has the operations, the programs and the checks. Every program is checked for exact
gradients and for coded ones. The folder gets a JSON file of each program; a run resumes after
those that are there. A failing program is made as small as it can be while it fails alike:

    python -m experiments.checks.fuzz --replay build/fuzz/000012.json

With `--steps`, programs run step by step, without XLA's fusions, and exact gradients are compared
with those of `jax.checkpoint` to the bit.
"""

import json
import os
import time
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.progress import track

from experiments.common.options import usage_errors
from experiments.common.record import describe_environment, write_json, write_table
from tests.fuzz import checks, programs

TRIALS = 60  # smaller programs that are tried for each failure
# Compiled functions of this many programs are kept at once.
CLEARED_AFTER = 20


def set_up() -> None:
    """As the tests are: eight devices, no rank promotion, compiled without optimization."""
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_numpy_rank_promotion", "raise")


def checks_by_steps(seed: int) -> list[tuple[str, str, int]]:
    """The checks of a program with `--steps`."""
    return [("steps", name, 1 + seed % 2) for name in ("Exact()", "nothing_saveable")]


def row_of(seed: int, minimise: bool, steps: bool) -> dict[str, Any]:
    """The program of a seed and what fails."""
    began = time.time()
    program = programs.generate(seed)
    row: dict[str, Any] = {"seed": seed, "program": str(program), "failures": []}
    of_both = (*checks.checks_of(2 * seed), *checks.checks_of(2 * seed + 1))
    for check in checks_by_steps(seed) if steps else of_both:
        try:
            found = checks.check(program, *check)
        except checks.NotFinite:
            row["not finite"] = True
            continue
        for kind in sorted({failure.kind for failure in found}):
            least = reduced(program, check, kind) if minimise else program
            row["failures"].append(
                {
                    "kind": kind,
                    "check": check,
                    "details": [f.detail for f in found if f.kind == kind],
                    "reduced": str(least),
                    "data": json.loads(least.to_json()),
                }
            )
    return row | {"seconds": round(time.time() - began, 1)}


def reduced(program: programs.Program, check: tuple[str, str, int], kind: str) -> programs.Program:
    """A smallest program with a failure of this kind."""

    def fails(candidate: programs.Program) -> bool:
        try:
            return kind in {failure.kind for failure in checks.check(candidate, *check)}
        except Exception:  # it fails without jaxcomp, too
            return False

    return programs.minimised(program, fails, TRIALS)


def replay(path: Path) -> None:
    """Runs the failing checks of a file again."""
    for failure in json.loads(path.read_text())["failures"]:
        program = programs.Program.from_json(json.dumps(failure["data"]))
        typer.echo(f"{program}\n{checks.check(program, *failure['check'])}")


@usage_errors()
def main(
    out: Annotated[Path | None, typer.Option(help="Folder for the results.")] = None,
    count: Annotated[int, typer.Option("--programs", help="Number of programs.")] = 2000,
    seed: Annotated[int, typer.Option(help="Seed of the first program.")] = 0,
    steps: Annotated[
        bool, typer.Option(help="Compare exact gradients with jax.checkpoint's step by step.")
    ] = False,
    minimise: Annotated[bool, typer.Option(help="Reduce the programs that fail.")] = True,
    file: Annotated[
        Path | None, typer.Option("--replay", help="Run the failures of a file again.")
    ] = None,
) -> None:
    """Check programs and list those that fail; exit with 1 if one does."""
    set_up()
    if file is not None:
        replay(file)
        return
    if out is None:
        raise typer.BadParameter("out: expected a folder")
    rows = []
    for number in track(range(seed, seed + count), "checking"):
        path = out / f"{number:06}.json"
        if not path.exists():
            write_json(path, row_of(number, minimise, steps))
        rows.append(json.loads(path.read_text()))
        if number % CLEARED_AFTER == 0:
            jax.clear_caches()
    failed = [(row, failure) for row in rows for failure in row["failures"]]
    table = [["seed", "kind", "policy", "detail", "reduced program"]]
    for row, failure in failed:
        first = failure["details"][0].replace("|", "\\|").replace("\n", " ")
        cells = [failure["kind"], failure["check"][1], first, f"`{failure['reduced']}`"]
        table.append([str(row["seed"]), *cells])
    title = f"{len({row['seed'] for row, _ in failed})} of {count} programs fail."
    typer.echo(write_table(out / "fuzz.md", title, table, describe_environment()["command"]))
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
