import ast

from experiments.mutants import ROOT, in_order, mutants_of

MODULE = ROOT / "jaxcomp/codecs/_levels.py"


def test_each_mutant_is_another_program_that_parses():
    original = ast.dump(ast.parse(MODULE.read_text()))
    mutants = mutants_of(MODULE)
    programs = {ast.dump(ast.parse(mutant.source())) for mutant in mutants}
    assert len(programs | {original}) == len(mutants) + 1


def test_annotations_messages_and_docstrings_stay(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.mutants.ROOT", tmp_path)
    module = tmp_path / "module.py"
    module.write_text(
        'def f(x: "2 3" = None) -> Literal[4]:\n'
        '    "Adds 1 + 1."\n'
        "    if not x:\n"
        '        raise ValueError(f"x={x + 1}: expected 2" + "!")\n'
        '    return f"{x - 1}", x < 1 + 2\n'
    )
    changes = [(mutant.before, mutant.after) for mutant in mutants_of(module)]
    assert changes == [
        ("not x", "(x)"),
        ("x < 1 + 2", "(x <= 1 + 2)"),
        ("1 + 2", "(1 - 2)"),
        ("1", "(2)"),
        ("2", "(3)"),
    ]


def test_tests_that_noticed_other_changes_come_before_the_rest():
    module = "jaxcomp/codecs/packing.py"
    killers = ["FAILED tests/codecs/test_sign_aware.py::test_a", "timeout", ""]
    own, doctests, killer, *rest = in_order(module, killers)
    assert (own, doctests) == ("tests/codecs/test_packing.py", module)
    assert killer == "tests/codecs/test_sign_aware.py"
    every = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests/codecs").glob("test_*")}
    assert {own, killer, *rest} == every
