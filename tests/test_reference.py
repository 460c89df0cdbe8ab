"""Every public name has a place in docs/reference, and every directive there names an object."""

import ast
import functools
import importlib
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
DIRECTIVES = [
    (page.name, name)
    for page in PAGES
    for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)
]
PACKAGES = ("codecs", "nn", "ops", "policies", "memory", "diagnostics", "planning")
MODULES = (
    "policies.recipes",
    *(f"models.{name}" for name in ("catalog", "resmlp", "resnet", "steps", "training")),
)


def _resolve(name):
    """The object of a dotted name: the longest prefix that is a module, then attributes."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        return functools.reduce(getattr, parts[count:], module)
    raise ModuleNotFoundError(name)


def _exported():
    """All public names, from the source: what packages re-export and what modules define."""
    tree = ast.parse((ROOT / "jaxcomp" / "__init__.py").read_text())
    (public,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    names = [f"jaxcomp.{name}" for name in public]
    for package in PACKAGES:
        tree = ast.parse((ROOT / "jaxcomp" / package / "__init__.py").read_text())
        imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        names += [f"jaxcomp.{package}.{a.asname}" for i in imports for a in i.names if a.asname]
    for module in MODULES:
        path = ROOT.joinpath("jaxcomp", *module.split(".")).with_suffix(".py")
        names += [
            f"jaxcomp.{module}.{node.name}"
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        ]
    return sorted({*names})


@pytest.mark.parametrize("name", [name for _, name in DIRECTIVES])
def test_directive_resolves(name):
    assert _resolve(name) is not None


def test_each_directive_is_there_once():
    names = [name for _, name in DIRECTIVES]
    assert len(set(names)) == len(names)


def test_public_names_are_those_of_the_list():
    """A name leaves `api.txt` only in a major version, after it was deprecated in a minor one."""
    assert _exported() == (ROOT / "tests" / "api.txt").read_text().split()


@pytest.mark.parametrize("name", _exported())
def test_public_name_has_a_place(name):
    found = _resolve(name)
    if hasattr(found, "__path__") or name == "jaxcomp.recipes":  # of a package: its contents
        package = found.__name__
        assert [n for _, n in DIRECTIVES if n.startswith((f"{package}.", f"{name}."))]
    else:
        last = name.rpartition(".")[2]
        documented = [_resolve(n) for _, n in DIRECTIVES if n.endswith(f".{last}")]
        assert any(found is other for other in documented)


def test_every_package_has_a_page():
    folders = {p.parent.name for p in (ROOT / "jaxcomp").glob("[a-z]*/__init__.py")}
    assert folders == {*PACKAGES, "transform", "models", "cli"}


def test_every_page_of_the_reference_has_directives():
    assert {page for page, _ in DIRECTIVES} == {page.name for page in PAGES}
