"""The Python blocks of README.md and docs/ run and print what they show; links lead somewhere."""

import ast
import contextlib
import doctest
import io
import json
import re
from pathlib import Path
from typing import Any

import jax
import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
# Small sizes for the cells of notebooks that are tagged "parameters".
NOTEBOOKS = {
    "resnet50_t4": """
BATCH, IMAGE, WIDTH, BLOCKS = 4, 32, 8, (1, 1)
ROWS, TRAIN, CARD = ["plain", "automatic"], True, "cpu"
""",
    "lora_v5e": """
WIDTH, HEADS, DEPTH, TOKENS, LENGTH, BATCH, RANK = 32, 2, 1, 64, 16, 4, 2
ROWS, TRAIN, CHIP = ["plain", "automatic"], True, "cpu"
""",
}
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# What JAX keeps without jaxcomp, which the pages show for JAX 0.10.2.
PLAIN = re.compile(
    r"(?<= of )[\d,]+(?= bytes)|[\d,]+(?= without compression)|\d+(?= MiB of temporary memory)"
    r"|[\d.]+(?= MiB while one is evaluated again)"
)

# A page whose examples show programs of JAX itself, as JAX before 0.12 writes them.
PROGRAMS = "docs/how-it-works/engine.md"
# Pages whose examples compile many programs, of `fit`, of memory and of transformers.
LONG = ("docs/howto/budget.md", "docs/howto/memory.md", "docs/howto/transformers.md")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def shown(lines: list[str], end: int) -> str:
    """The comment lines right below line `end`, which show what it prints."""
    found = []
    for line in lines[end:]:
        if not line.startswith("#"):
            break
        found.append(line.removeprefix("#").removeprefix(" "))
    return "\n".join(found)


def run(page: Path) -> None:
    """Runs the blocks of a page in one namespace, and compares what is printed below a `print`."""
    text = page.read_text()
    names = {"__name__": page.stem}
    for block in BLOCK.finditer(text):
        code, first = block.group(1), text.count("\n", 0, block.start(1))
        lines = code.splitlines()
        for statement in ast.parse(code).body:
            end = statement.end_lineno
            ast.increment_lineno(statement, first)
            program = compile(ast.Module([statement], []), page.name, "exec")
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(program, names)
            expected, found = shown(lines, end), printed.getvalue()
            if jax.__version_info__ != (0, 10, 2):
                expected, found = (PLAIN.sub("N", text) for text in (expected, found))
            where = f"{name(page)}:{first + end}"
            if found and expected:
                same = doctest.OutputChecker().check_output(expected + "\n", found, OPTIONS)
                assert same, f"{where}: expected\n{expected}\nfound\n{found}"


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name(page), marks=[pytest.mark.slow] * (name(page) in LONG))
        for page in PAGES
        if BLOCK.search(page.read_text())
    ],
)
def test_python_blocks_run_and_print_what_they_show(page, tmp_path, monkeypatch):
    if name(page) == PROGRAMS and jax.__version_info__ >= (0, 12):
        pytest.skip("JAX 0.12 writes other programs")
    monkeypatch.chdir(tmp_path)
    with jax.numpy_rank_promotion("allow"):  # as users have it
        run(page)


def cells(notebook: str) -> list[dict[str, Any]]:
    """The cells of code."""
    found = json.loads((ROOT / "docs" / "notebooks" / f"{notebook}.ipynb").read_text())["cells"]
    return [cell for cell in found if cell["cell_type"] == "code"]


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_notebooks_run_in_small_sizes(notebook, capsys):
    names: dict[str, Any] = {}
    with jax.numpy_rank_promotion("allow"):
        for cell in cells(notebook):
            is_sizes = "parameters" in cell["metadata"].get("tags", ())
            exec(NOTEBOOKS[notebook] if is_sizes else "".join(cell["source"]), names)
    assert [row.error for row in names["table"].rows] == [None, None]
    first, last = re.findall(r"\d+\.\d+", capsys.readouterr().out)[-2:]
    assert float(last) < float(first)


def test_tutorials_and_notebooks_need_the_package_alone():
    """They import no `experiments`, and notebooks hold nothing of who ran them."""
    folder = ROOT / "docs"
    assert {path.stem for path in folder.rglob("*.ipynb")} == NOTEBOOKS.keys()
    codes = [path.read_text() for path in (folder / "tutorials").glob("*.py")]
    for cell in [cell for notebook in NOTEBOOKS for cell in cells(notebook)]:
        assert (cell["outputs"], cell["execution_count"]) == ([], None)
        codes.append("".join(cell["source"]))
    imports = r"^(?:import|from) (\w+)"
    found = {name for code in codes for name in re.findall(imports, code, re.MULTILINE)}
    assert found == {"flax", "functools", "jax", "jaxcomp", "matplotlib", "optax", "time"}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_relative_links_lead_somewhere(page):
    links = LINK.findall(FENCED.sub("", page.read_text()))
    files = {link.partition("#")[0] for link in links if not re.match(r"[a-z]+:", link)}
    assert [file for file in sorted(files) if not (page.parent / file).exists()] == []


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text().replace("|", " ")
    assert len(text.split()) <= 700
