"""Counts of the engine's source: how its files hang together, and how its names and types read."""

import ast
from collections.abc import Iterator
from pathlib import Path

import jaxcomp

PACKAGE = Path(jaxcomp.__file__).parent
ENGINE = PACKAGE / "transform"
VAGUE = {"made", "found", "given", "own", "kept", "one", "each", "alike", "wanted"}
_LISTS = {"equations", "eqns"}


def counts() -> dict[str, float]:
    """All counts by what they count."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(ENGINE.rglob("*.py"))}
    arrows = {(start, end) for start, tree in trees.items() for end in _imported(tree) - {start}}
    rooms = {(_room(start), _room(end)) for start, end in arrows if _room(start) != _room(end)}
    annotations = [
        node.annotation
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.arg) and node.annotation is not None
    ]
    vague = sum(map(_is_vague, (node for tree in trees.values() for node in ast.walk(tree))))
    return {
        "arrows between rooms": len(rooms),
        "arrows between files": len(arrows),
        "annotated arguments with Any, %": 100 * sum(map(_has_any, annotations)) / len(annotations),
        "interpreter loops": sum(len(list(interpreters(tree))) for tree in trees.values()),
        "vague names per 1,000 lines": 1000 * vague / sum(map(_lines, trees)),
        "lines of transform": sum(map(_lines, trees)),
        "lines of jaxcomp": sum(map(_lines, PACKAGE.rglob("*.py"))),
    }


def interpreters(tree: ast.AST) -> Iterator[str]:
    """The names of functions that take the steps of a program one by one.

    Such a function has a `for` statement over a name or an attribute `equations` or `eqns`, or a
    call with one. In the loop, what an equation gives is put into a dict by the variables that it
    makes: either `env[v] = ...`, or a call `zip(v, ...)`. There v is `outvars` or a call of
    `outputs`, or a name that the loop takes from one of these. A loop counts for the innermost
    function around it.
    """
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            loops = [node for node in _inside(function) if isinstance(node, ast.For)]
            if any(_is_over_equations(loop) and _fills(loop) for loop in loops):
                yield function.name


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    """What is in a function, but not in another function in it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef):
            yield child
            yield from _inside(child)


def _is_over_equations(loop: ast.For) -> bool:
    names = {getattr(n, "attr", getattr(n, "id", None)) for n in ast.walk(loop.iter)}
    return not names.isdisjoint(_LISTS)


def _fills(loop: ast.For) -> bool:
    nodes = list(_inside(loop))
    names = {
        name.id
        for node in nodes
        if isinstance(node, ast.Assign) and _takes_results(node.value)
        for target in node.targets
        for name in ast.walk(target)
        if isinstance(name, ast.Name)
    }

    def is_by_results(key: ast.AST) -> bool:
        parts = list(ast.walk(key))
        of_names = any(isinstance(part, ast.Name) and part.id in names for part in parts)
        return of_names or any(map(_takes_results, parts))

    return any(
        (isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store) and is_by_results(n.slice))
        or (isinstance(n, ast.Call) and _called(n) == "zip" and is_by_results(n.args[0]))
        for n in nodes
    )


def _takes_results(value: ast.AST) -> bool:
    """Whether an expression is `outvars`, `outputs(...)` or a part of one of these."""
    while isinstance(value, ast.Subscript):
        value = value.value
    if isinstance(value, ast.Call):
        return _called(value) == "outputs"
    return isinstance(value, ast.Attribute) and value.attr == "outvars"


def _called(call: ast.Call) -> str:
    return getattr(call.func, "id", "")


def _imported(tree: ast.AST) -> set[Path]:
    """The files of the engine that a file imports."""
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    paths = {PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py") for module in modules}
    return {path for path in paths if path.is_relative_to(ENGINE) and path.exists()}


def _room(path: Path) -> str:
    """The folder of a file of the engine; "" for what users call."""
    return path.parent.relative_to(ENGINE).as_posix()


def _has_any(annotation: ast.expr) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(annotation))


def _is_vague(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return isinstance(node.ctx, ast.Store) and node.id in VAGUE
    return isinstance(node, ast.arg) and node.arg in VAGUE


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())
