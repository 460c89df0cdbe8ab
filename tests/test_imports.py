"""An import only goes down: from a package of the library to one on a lower floor."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
# From the lowest floor up. `memory` imports nothing of the rest, and stands at the bottom for it.
FLOORS = (
    "memory",
    "_core",
    "codecs",
    "ops",
    "nn",
    "policies",
    "transform",
    "diagnostics",
    "planning",
    "models",
    "cli",
)


def _name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    _name(path): path for top in ("jaxcomp", "experiments") for path in (ROOT / top).rglob("*.py")
}


def _imported(name):
    """The modules of this repository that a module imports, anywhere in it."""
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level]
            source = ".".join([*(above if node.level else ()), *filter(None, [node.module])])
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                found.add(inner if inner in MODULES else source)
    return found & MODULES.keys() - {name}


IMPORTS = {name: _imported(name) for name in MODULES}


def _floor(name):
    return name.split(".")[1] if name.startswith("jaxcomp.") else None


@pytest.mark.parametrize("floor", FLOORS)
def test_no_import_climbs(floor):
    allowed = FLOORS[: FLOORS.index(floor) + 1] if floor != "_core" else ("_core",)
    climbing = [
        f"{name} imports {other}"
        for name, others in IMPORTS.items()
        for other in others
        if _floor(name) == floor and _floor(other) not in allowed
    ]
    assert not climbing


def test_every_package_has_a_floor():
    packages = {_floor(name) for name in MODULES if name.startswith("jaxcomp.")}
    assert packages == set(FLOORS)


def test_no_circles():
    """Modules can be ordered so that each imports only earlier ones."""
    left = {
        name: {other for other in others if not name.startswith(f"{other}.")}
        for name, others in IMPORTS.items()
    }
    while ready := [name for name, others in left.items() if not others]:
        for name in ready:
            del left[name]
        for others in left.values():
            others.difference_update(ready)
    assert not left


def test_the_library_imports_nothing_of_the_experiments():
    outside = {n: o for n, o in IMPORTS.items() if n.startswith("jaxcomp")}
    assert not [n for n, o in outside.items() if any(m.startswith("experiments") for m in o)]


def test_helper_modules_are_private():
    """And so no module has the name of a function that stands beside it."""
    public = {
        name
        for name in MODULES
        if name.count(".") == 2 and not any(part.startswith("_") for part in name.split("."))
    }
    models = {"catalog", "resmlp", "resnet", "sharding", "steps", "training"}
    expected = {f"jaxcomp.models.{name}" for name in models}
    expected |= {"jaxcomp.codecs.noise", "jaxcomp.codecs.packing", "jaxcomp.policies.recipes"}
    assert {name for name in public if name.startswith("jaxcomp.")} == expected
