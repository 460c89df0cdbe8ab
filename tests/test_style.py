"""One dialect in the source of the library."""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent / "jaxcomp"
PROPERTIES = {"property", "cached_property", "setter"}
# Nouns that end as verbs in the third person do.
NOUNS = {
    "Axes",
    "Bias",
    "Bits",
    "Bytes",
    "Codes",
    "Coefficients",
    "Elements",
    "Its",
    "Logits",
    "Methods",
    "Moments",
    "Names",
    "Operands",
    "Paths",
    "Results",
    "Seconds",
    "Shapes",
    "This",
    "Values",
    "Variables",
    "Widths",
}


def _functions():
    for path in ROOT.rglob("*.py"):
        if path.parent.name == "cli":  # docstrings of commands are the text of --help
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                names = {getattr(d, "attr", getattr(d, "id", "")) for d in node.decorator_list}
                if not names & PROPERTIES:
                    yield path.relative_to(ROOT), node


def test_docstrings_of_functions_begin_with_a_verb_in_the_third_person():
    others = []
    for path, node in _functions():
        first = (ast.get_docstring(node) or "Is").split()[0].rstrip(",.")
        if not re.fullmatch(r"[A-Z][a-z]*s", first) or first in NOUNS:
            others.append(f"{path}:{node.lineno} {node.name}: {first}")
    assert not others, "\n".join(others)
