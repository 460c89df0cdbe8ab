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
    "__main__",
)
# The same for the rooms of `transform`. The modules beside them, which users call, are on top.
ROOMS = ("_program", "_pieces", "_choice", "_recognition", "_execution", "_nested")
# Modules of `transform` without a test of their name, each with the test that covers it.
COVERED_BY = {
    "_choice.bias": "recognition/test_bias.py",
    "_choice.context": "choice/test_schedule.py",
    "_choice.decisions": "choice/test_schedule.py",
    "_choice.graph": "choice/test_choice.py",
    "_choice.recomputed_products": "nested/test_kept.py",
    "_execution.forward": "choice/test_schedule.py",
    "_execution.waiting": "execution/test_backward.py",
    "_model_attributes": "test_compress.py",
    "_nested.bounded": "nested/test_regions.py",
    "_nested.nested": "nested/test_loops.py",
    "_nested.sums": "nested/test_chunks.py",
    "_nested.scheduled": "nested/test_loops.py",
    "_pieces.limits": "pieces/test_slices.py",
    "_pieces.pieces": "pieces/test_slices.py",
    "_pieces.slice": "pieces/test_slices.py",
    "_program.automatic_axes": "../sharding/test_explicit.py",
    "_program.builder": "test_checkpoint.py",
    "_program.keyed": "program/test_custom_rules.py",
    "_program.origins": "test_plan.py",
    "_program.replaced": "test_interceptors.py",
    "_program.types": "choice/test_choice.py",
    "_program.without_codes": "program/test_custom_rules.py",
    "_recognition.batch_norms": "recognition/test_recognize.py",
    "_recognition.beginnings": "recognition/test_recognize.py",
    "_recognition.layer_scale": "recognition/test_attention.py",
    "_recognition.means": "recognition/test_recognize.py",
    "_recognition.order": "recognition/test_recognize.py",
    "_recognition.pattern": "recognition/test_recognize.py",
    "_recognition.substitute": "recognition/test_recognize.py",
    "_recognition.norms": "recognition/test_recognize.py",
    "_recognition.traced_norms": "recognition/test_curved_norms.py",
    "_recognition.unit": "recognition/test_recognize.py",
}


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


def _room(name):
    parts = name.split(".")
    return parts[2] if parts[:2] == ["jaxcomp", "transform"] and len(parts) == 4 else None


@pytest.mark.parametrize("room", ROOMS)
def test_no_import_climbs_between_rooms(room):
    allowed = ROOMS[: ROOMS.index(room) + 1]
    climbing = [
        f"{name} imports {other}"
        for name, others in IMPORTS.items()
        for other in others
        if _room(name) == room and _floor(other) == "transform" and _room(other) not in allowed
    ]
    assert not climbing


def test_modules_of_rooms_have_tests():
    tests = ROOT / "tests" / "transform"
    without = set()
    for name in MODULES:
        parts = name.split(".")
        if parts[:2] != ["jaxcomp", "transform"] or parts[-1] in ("transform", *ROOMS):
            continue
        *rooms, module = (part.removeprefix("_") for part in parts[2:])
        if not tests.joinpath(*rooms, f"test_{module}.py").exists():
            without.add(".".join(parts[2:]))
    assert without == COVERED_BY.keys()
    assert all((tests / test).exists() for test in COVERED_BY.values())


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
