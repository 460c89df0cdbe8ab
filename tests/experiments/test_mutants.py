import ast

from experiments.checks.mutants import ROOT, covering_tests, mutants_of, own_first

MODULE = ROOT / "jaxcomp/codecs/_levels.py"


def test_each_mutant_is_another_program_that_parses():
    original = ast.dump(ast.parse(MODULE.read_text()))
    mutants = mutants_of(MODULE)
    programs = {ast.dump(ast.parse(mutant.source())) for mutant in mutants}
    assert len(programs | {original}) == len(mutants) + 1


def test_annotations_messages_and_docstrings_stay(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.checks.mutants.ROOT", tmp_path)
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


def test_tests_are_those_that_run_the_line(tmp_path):
    package, tests = tmp_path / "jaxcomp/codecs", tmp_path / "tests/codecs"
    for folder in (package, tests):
        folder.mkdir(parents=True)
    for name in ("jaxcomp/__init__.py", "jaxcomp/codecs/__init__.py"):
        (tmp_path / name).touch()
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    (package / "halves.py").write_text("def half(x):\n    if x < 0:\n        x = -x\n    return x")
    (tests / "test_halves.py").write_text(
        "import time, pytest\nfrom jaxcomp.codecs.halves import half\n"
        "@pytest.mark.parametrize('x', [-1, 1])\n"
        "def test_half(x):\n    time.sleep(0.1 - x / 20)\n    assert half(x) == 1\n"
    )
    found = covering_tests(["codecs"], tmp_path)
    slow, fast = (f"tests/codecs/test_halves.py::test_half[{x}]" for x in (-1, 1))
    module = "jaxcomp/codecs/halves.py"
    assert {line: found[module, line] for line in (1, 2, 3)} == {
        1: [fast, slow],
        2: [fast, slow],
        3: [slow],
    }


def test_tests_of_the_own_file_and_package_come_first():
    tests = ["tests/nn/test_a.py::test", "tests/ops/test_b.py::test[packing.py]"]
    tests = [*tests, "tests/ops/test_packing.py::test", "jaxcomp/ops/_b.py::doctest"]
    ordered = own_first("jaxcomp/ops/_packing.py", tests)
    assert ordered == [tests[2], tests[1], tests[3], tests[0]]
