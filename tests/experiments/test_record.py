"""What a record says of the code that made it."""

import datetime
import json
import re
import subprocess
from pathlib import Path

import experiments
import jaxcomp
from experiments.common.record import describe_checkout, describe_environment


def test_a_record_names_the_commit_and_whether_files_differ_from_it(tmp_path):
    assert describe_checkout(tmp_path) == {"commit": None, "clean": None}

    def git(*arguments):
        identity = "-c", "user.name=n", "-c", "user.email=e"
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    git("init")
    for name in ("jaxcomp/code.py", "experiments/results/record.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    commit = git("rev-parse", "HEAD").strip()
    assert describe_checkout(tmp_path) == {"commit": commit, "clean": True}
    (tmp_path / "experiments/results/record.json").write_text("2")  # as a command writes it
    assert describe_checkout(tmp_path)["clean"]
    (tmp_path / "jaxcomp/code.py").write_text("2")
    assert describe_checkout(tmp_path) == {"commit": commit, "clean": False}


def test_a_record_names_the_version_and_the_day():
    described = describe_environment()
    assert described["code"]["version"] == jaxcomp.__version__
    assert len(described["date"]) == len("2026-01-31")


RESULTS = Path(experiments.__file__).parent / "results"
ARCHIVE = RESULTS / "archive"


def test_every_record_names_its_command_code_date_and_versions():
    """Those that are not in the archive are of a clean checkout."""
    records = sorted(RESULTS.rglob("*.json"))
    assert records
    for path in records:
        record = json.loads(path.read_text())
        assert re.fullmatch("[0-9a-f]{40}", record["code"]["commit"]), path
        assert record["code"].keys() == {"version", "commit", "clean"}, path
        assert record["code"]["clean"] or path.is_relative_to(ARCHIVE), path
        assert record["command"] and record["versions"], path
        assert not re.search(r"[\s=]['\"]?/", record["command"]), path  # no paths of a machine
        datetime.date.fromisoformat(record["date"])


def test_the_archive_says_why_and_holds_nothing_that_was_made_again():
    patterns = set(re.findall(r"`([^`\s]*)`", (ARCHIVE / "README.md").read_text())) - {"clean"}
    folders = {path.parent.relative_to(ARCHIVE) for path in ARCHIVE.rglob("*.json")}
    assert {p for p in patterns if not any(f.match(p) for f in folders)} == set()
    assert {f for f in folders if not any(f.match(p) for p in patterns)} == set()
    assert not [f for f in folders if (RESULTS / f).exists() and list((RESULTS / f).glob("*.json"))]
