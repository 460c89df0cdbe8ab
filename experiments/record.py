"""Results in JSON files, with what is needed to make them again."""

import json
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import optax
import typer


def describe_environment() -> dict[str, Any]:
    """The command line, the devices and the versions of what computes."""
    return {
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "devices": [device.device_kind for device in jax.devices()],
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "flax": flax.__version__,
            "optax": optax.__version__,
        },
    }


def make_folder(out: Path) -> None:
    """Makes a command's folder of results, where it is not there yet.

    Raises:
        OSError: it cannot be made.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"out={str(out)!r}: expected a folder, there or to be made ({error.strerror})"
        ) from error


def read_table(path: Path, described: dict[str, Any]) -> dict[str, Any]:
    """An earlier table of the same description, to which rows are added.

    Raises:
        BadParameter: there is none, or it is of another description.
    """
    if not path.exists():
        raise typer.BadParameter(f"add: {path} is not there yet")
    table: dict[str, Any] = json.loads(path.read_text())
    other = [f"{key}={table.get(key)!r}" for key in described if table.get(key) != described[key]]
    if other:
        raise typer.BadParameter(f"add: {path} is of {', '.join(other)}")
    return table


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a file at once or not at all; makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    unfinished.replace(path)


def write_table(path: Path, title: str, rows: Sequence[Sequence[str]], command: str) -> str:
    """Writes a Markdown table, its header first, under a title and over a command; returns it."""
    header, *body = rows
    lines = [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *body)]
    text = "\n".join([f"{title}\n", *lines, f"\n    {command}\n"])
    path.write_text(text)
    return text
