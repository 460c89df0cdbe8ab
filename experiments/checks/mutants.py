"""Changes one operator or number of the library at a time and looks whether a test fails.

    python -m experiments.checks.mutants --out experiments/results/mutants

A mutant is killed if a test that runs its line fails, or if these tests run longer than `TIMEOUT`.
Which tests run a line is measured first, in a run without a change of the tests of `PACKAGES` and
`READERS`; what a test starts as another process is not seen. Those of the module's own test file
come first, then those of its package, and fast ones before slow ones. The run resumes: mutants in
the folder's `mutants.json` count and are not run again. A mutant's place in the random order does
not depend on the others.
"""

import ast
import copy
import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import coverage
import typer
from rich.progress import track

from experiments.common.options import Out, usage_errors
from experiments.common.record import describe_environment, write_json, write_table

ROOT = Path(__file__).parents[2]
PACKAGES = ("codecs", "ops", "transform")
READERS = ("diagnostics", "models", "nn")  # their tests run the packages, too
COPIED = ("conftest.py", "pyproject.toml", "README.md", "docs", "experiments", "jaxcomp", "tests")
TIMEOUT = 1800  # seconds; the tests of a package take a third of it
REPLACEMENTS: dict[type[ast.AST], Any] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A change of one expression.

    Attributes:
        module: Path of the file, relative to the repository.
        line: Number of its first line.
        start: Offset of the expression in the file's bytes.
        before: The expression.
        after: What replaces it.
    """

    module: str
    line: int
    start: int
    before: str
    after: str

    def source(self) -> bytes:
        """The file with the change."""
        text = (ROOT / self.module).read_bytes()
        end = self.start + len(self.before.encode())
        return text[: self.start] + self.after.encode() + text[end:]


def mutants_of(path: Path) -> list[Mutant]:
    """All mutants of a module, in the order of its lines."""
    text = path.read_bytes()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node in _expressions(ast.parse(text)):
        changed = _changed(node)
        if changed is not None:
            assert node.end_lineno is not None and node.end_col_offset is not None
            start = starts[node.lineno - 1] + node.col_offset
            before = text[start : starts[node.end_lineno - 1] + node.end_col_offset].decode()
            module = path.relative_to(ROOT).as_posix()
            found.append(Mutant(module, node.lineno, start, before, f"({ast.unparse(changed)})"))
    return sorted(found, key=lambda mutant: (mutant.line, mutant.start))


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions of a program that run: no annotations, and no messages of errors."""
    if isinstance(node, ast.expr):
        yield node
    for name, field in ast.iter_fields(node):
        if name in ("annotation", "returns") or isinstance(node, ast.Raise | ast.JoinedStr):
            continue
        for child in field if isinstance(field, list) else [field]:
            if isinstance(child, ast.AST):
                yield from _expressions(child)


def _changed(node: ast.expr) -> ast.expr | None:
    """The expression with its first operator replaced, or a number raised by one."""
    changed = copy.deepcopy(node)
    if isinstance(changed, ast.BinOp | ast.BoolOp) and type(changed.op) in REPLACEMENTS:
        changed.op = REPLACEMENTS[type(changed.op)]()
    elif isinstance(changed, ast.Compare) and type(changed.ops[0]) in REPLACEMENTS:
        changed.ops[0] = REPLACEMENTS[type(changed.ops[0])]()
    elif isinstance(changed, ast.UnaryOp) and isinstance(changed.op, ast.Not):
        return changed.operand
    elif isinstance(changed, ast.Constant) and isinstance(changed.value, int | float):
        if isinstance(changed.value, bool):
            return None
        changed.value += 1
    else:
        return None
    return changed


def covering_tests(packages: Sequence[str], folder: Path) -> dict[tuple[str, int], list[str]]:
    """The tests that run a line, for each line of the modules of `PACKAGES`, fast ones first.

    A line that runs when its module is imported has all tests.

    Args:
        packages: Names of the packages in `jaxcomp` whose tests are run.
        folder: A copy of the repository.
    """
    measure = [*(f"--cov=jaxcomp/{name}" for name in PACKAGES), "--cov-context=test"]
    report = ["--cov-report=", "-vv", "--durations=0", "--durations-min=0"]
    tests = [f"{part}/{name}" for part in ("tests", "jaxcomp") for name in packages]
    run = pytest([*measure, *report, *tests], folder)
    if run.returncode:
        raise RuntimeError(f"the tests fail without a change:\n{run.stdout[-2000:]}")
    phases = (line.split(maxsplit=2) for line in run.stdout.splitlines())
    seconds = {
        phase[2]: float(phase[0].rstrip("s"))
        for phase in phases
        if len(phase) == 3 and phase[1] == "call" and phase[0].endswith("s")
    }
    data = coverage.CoverageData(folder / ".coverage")
    data.read()
    found = {}
    for path in data.measured_files():
        module = Path(path).relative_to(folder).as_posix()
        for line, contexts in data.contexts_by_lineno(path).items():
            names = {context.rpartition("|")[0] for context in contexts}
            running = seconds.keys() if "" in names else names & seconds.keys()
            found[module, line] = sorted(running, key=lambda test: (seconds[test], test))
    return found


def pytest(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs pytest in a copy of the repository, which has a compilation cache of its own.

    Raises:
        TimeoutExpired: It takes longer than `TIMEOUT`.
    """
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env=os.environ | {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )


def own_first(module: str, tests: list[str]) -> list[str]:
    """The same tests, those of the module's own file and of its package before the others."""
    path = Path(module)
    own = f"/test_{path.stem.removeprefix('_')}.py"

    def rank(test: str) -> tuple[bool, bool]:
        file = test.partition("::")[0]
        return not file.endswith(own), f"/{path.parent.name}/" not in file

    return sorted(tests, key=rank)


def first_failure(mutant: Mutant, tests: list[str], folder: Path) -> str | None:
    """Runs the tests in a copy of the repository that has the change.

    Returns:
        The test that failed, "timeout", or None if none fails.
    """
    if not tests:
        return None
    path = folder / mutant.module
    original = path.read_bytes()
    path.write_bytes(mutant.source())
    try:
        run = pytest(["-x", *tests], folder)
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        path.write_bytes(original)
    if run.returncode == 0:
        return None
    lines = run.stdout.splitlines()
    failed = [x for x in lines if x.startswith(("FAILED", "ERROR"))]
    return (failed or lines[-1:] or ["ERROR"])[0].split(" - ")[0]


@usage_errors()
def main(out: Out, count: int = 200, seed: int = 0) -> None:
    """Runs a random sample of mutants and lists those that no test notices."""
    paths = sorted(p for name in PACKAGES for p in (ROOT / "jaxcomp" / name).glob("*.py"))
    every = [mutant for path in paths for mutant in mutants_of(path)]
    every.sort(key=lambda mutant: hashlib.sha256(f"{seed} {mutant}".encode()).digest())
    record = out / "mutants.json"
    rows = json.loads(record.read_text())["mutants"] if record.exists() else []
    done = {(row["module"], row["start"], row["after"]) for row in rows}
    rest = [x for x in every if (x.module, x.start, x.after) not in done]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in COPIED:
            copied = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copied(ROOT / part, folder / part)
        typer.echo("measuring which tests run a line")
        tests = covering_tests((*PACKAGES, *READERS), folder)
        for mutant in track(rest[: max(0, count - len(rows))], "testing"):
            began = time.time()
            line = tests.get((mutant.module, mutant.line), [])
            killed_by = first_failure(mutant, own_first(mutant.module, line), folder)
            rows.append(
                dataclasses.asdict(mutant)
                | {"killed by": killed_by, "seconds": round(time.time() - began)}
            )
            write_json(record, describe_environment() | {"of": len(every), "mutants": rows})
            _report(rows, out)
    typer.echo(_report(rows, out))


def _report(rows: list[dict[str, Any]], out: Path) -> str:
    survivors = [row for row in rows if row["killed by"] is None]
    table = [["module", "line", "before", "after"]]
    for row in sorted(survivors, key=lambda row: (row["module"], row["line"])):
        code = [" ".join(row[name].split()) for name in ("before", "after")]
        table.append([row["module"], str(row["line"]), *(f"`{text}`" for text in code)])
    title = (
        f"{len(rows) - len(survivors)} of {len(rows)} mutants are killed. The tests that run the "
        "line pass with these:"
    )
    return write_table(out / "mutants.md", title, table, describe_environment()["command"])


if __name__ == "__main__":
    typer.run(main)
