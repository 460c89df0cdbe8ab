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


def test_every_record_names_its_command_code_date_and_versions():
    """A commit with `clean: null` is that which added the record: it was made with earlier code."""
    records = sorted(Path(experiments.__file__).parent.glob("results/**/*.json"))
    assert records
    for path in records:
        record = json.loads(path.read_text())
        assert re.fullmatch("[0-9a-f]{40}", record["code"]["commit"]), path
        assert record["code"].keys() == {"version", "commit", "clean"}, path
        assert record["command"] and record["versions"], path
        datetime.date.fromisoformat(record["date"])
