"""JSON and Markdown files of results, with the information to reproduce them."""

import datetime
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import optax
import typer

import jaxcomp


def describe_environment() -> dict[str, Any]:
    """The command line, the code, the day, the devices, and the versions of other packages."""
    return {
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "code": {"version": jaxcomp.__version__} | describe_checkout(Path(__file__).parent),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "devices": [device.device_kind for device in jax.devices()],
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "flax": flax.__version__,
            "optax": optax.__version__,
        },
    }


def describe_checkout(folder: Path) -> dict[str, Any]:
    """The commit of a Git checkout, and whether its files are those of the commit.

    Both are None if the folder is in no checkout. New files that Git does not know do not count.
    """

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(folder), *arguments]
        try:
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout
        except (OSError, subprocess.CalledProcessError):
            return None

    commit = git("rev-parse", "HEAD")
    changes = git("status", "--porcelain", "--untracked-files=no", ":/jaxcomp", ":/experiments")
    results = ("experiments/results/",)
    changed = [line for line in (changes or "").splitlines() if not line[3:].startswith(results)]
    return {
        "commit": None if commit is None else commit.strip(),
        "clean": None if commit is None else not changed,
    }


def make_folder(out: Path) -> None:
    """Creates the results folder of a command, if it does not exist.

    Raises:
        OSError: the folder cannot be created.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"out={str(out)!r}: expected a folder that exists or can be created ({error.strerror})"
        ) from error


def read_table(path: Path, described: dict[str, Any]) -> dict[str, Any]:
    """Reads an existing table, to which the caller adds rows.

    Args:
        path: the JSON file of the table.
        described: the values that the table must have, such as the network and the target.

    Returns:
        The table.

    Raises:
        BadParameter: the file does not exist, or its values differ from ``described``.
    """
    if not path.exists():
        raise typer.BadParameter(f"add: {path} does not exist")
    table: dict[str, Any] = json.loads(path.read_text())
    other = [key for key in described if table.get(key) != described[key]]
    if other:
        found, expected = (
            ", ".join(f"{key}={values.get(key)!r}" for key in other)
            for values in (table, described)
        )
        raise typer.BadParameter(f"add: {path} is of {found}; expected {expected}")
    return table


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file atomically, and creates its folder if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    unfinished.replace(path)


def write_table(path: Path, title: str, rows: Sequence[Sequence[str]], command: str) -> str:
    """Writes a Markdown file with a title, a table and the command that made the table.

    Args:
        path: the file to write.
        title: the text before the table.
        rows: the cells of each row. The first row is the header.
        command: the text after the table.

    Returns:
        The text of the file.
    """
    header, *body = rows
    lines = [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *body)]
    text = "\n".join([f"{title}\n", *lines, f"\n    {command}\n"])
    path.write_text(text)
    return text
