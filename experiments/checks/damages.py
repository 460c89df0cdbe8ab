"""Damages files that jaxcomp and its training runs read: each damage is told, nothing is lost."""

import json
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from experiments.training.checkpoint import Checkpoints
from jaxcomp import recipes
from jaxcomp.memory import _answers as answers
from jaxcomp.memory._buffer_assignment import DUMPED
from jaxcomp.models.training import TrainState
from jaxcomp.planning import FittedPlan
from jaxcomp.policies import Policy

Damage = Callable[[bytes, random.Random], bytes]


def _flipped(data: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :]


def _replaced(data: bytes, draw: random.Random) -> bytes:
    """Returns JSON in which a field has a value of another kind."""
    content = json.loads(data)
    name = draw.choice([name for name in content if name != "noise"])  # which may be a number
    other = "text" if isinstance(content[name], int | float | dict) else 3.5
    return json.dumps(content | {name: other}).encode()


def _without_a_field(data: bytes, draw: random.Random) -> bytes:
    content = json.loads(data)
    del content[draw.choice(["version", *(n for n in content if n in ("rules", "parts"))])]
    return json.dumps(content).encode()


OF_ALL: dict[str, Damage] = {
    "empty": lambda data, draw: b"",
    "cut": lambda data, draw: data[: draw.randrange(len(data) - 2)],
    "noise": lambda data, draw: draw.randbytes(len(data)),
    "deep": lambda data, draw: b"[" * 10**5,
}
OF_SUMMED = OF_ALL | {"flipped bit": _flipped}
OF_JSON = OF_ALL | {"a value of another kind": _replaced, "a field is gone": _without_a_field}


def _state(step: int) -> TrainState:
    weights: Any = {"w": jnp.arange(100.0) * step}
    none: Any = {}
    return TrainState(jnp.int32(step), weights, none, ())


class Checkpoint:
    """A checkpoint of two: the one before is loaded, a warning names the file, saving goes on."""

    def __init__(self, folder: Path) -> None:
        self.whole, self.folder = folder / "whole", folder / "damaged"
        for step in (1, 2):
            Checkpoints(self.whole).save(_state(step), {"steps": step})

    def told(self, name: str, damage: Damage, draw: random.Random) -> str:
        """Returns what is told of a damage; empty if anything is lost or silent."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.whole, self.folder)
        file = draw.choice(sorted(p for p in (self.folder / "2").rglob("*") if p.is_file()))
        _write_damaged(file, damage, draw)
        checkpoints = Checkpoints(self.folder)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loaded = int(checkpoints.load_state(_state(0)).step)
        checkpoints.save(_state(2), {"steps": 2})
        goes_on = Checkpoints(self.folder).load_record() == {"steps": 2}
        text = "; ".join(str(warning.message) for warning in caught)
        is_named = file.name in text or file.name == "sha256.json"  # whose sums are of others
        return text * (loaded == 1 and goes_on and is_named)


class Answer:
    """A file of the cache of compilations: a warning names it, and the step is compiled anew."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "answer"
        self.content: dict[str, Any] = {
            "hlo_text": "HloModule m",
            "memory": {"temp_size_in_bytes": 8},
            "compile_seconds": 0.5,
            "xla_flag": None,
            "dump": dict.fromkeys(DUMPED, "text"),
        }

    def told(self, name: str, damage: Damage, draw: random.Random) -> str:
        """Returns what is told of a damage; empty if anything is lost or silent."""
        answers.write(self.file, self.content)
        _write_damaged(self.file, damage, draw)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = answers.read(self.file)
        if found == self.content:
            return "a byte that holds no content"  # of gzip's header
        return "; ".join(str(warning.message) for warning in caught) * (found is None)


class Text:
    """JSON text: a ValueError says what it should be."""

    def __init__(self, folder: Path, read: Callable[[str], object], text: str) -> None:
        self.file, self.read, self.text = folder / "text", read, text

    def told(self, name: str, damage: Damage, draw: random.Random) -> str:
        """Returns what is told of a damage; empty if anything is lost or silent."""
        self.file.write_text(self.text)
        _write_damaged(self.file, damage, draw)
        try:
            self.read(self.file.read_bytes().decode(errors="replace"))
        except ValueError as error:
            return str(error)
        return ""


def _write_damaged(file: Path, damage: Damage, draw: random.Random) -> None:
    whole = file.read_bytes()
    while (damaged := damage(whole, draw)) == whole:  # such as an empty file
        damage = OF_SUMMED["flipped bit"] if whole else lambda data, draw: b"?"
    file.write_bytes(damaged)


def run(count: int, seed: int) -> list[dict[str, str]]:
    """Damages files.

    Args:
        count: Number of damages.
        seed: Seed of files, places and kinds.

    Returns:
        A row for each: the file, the damage, and what is told of it; "" if nothing is.
    """
    draw = random.Random(seed)
    plan = FittedPlan("cpu", 8, 48, "plain", None, "plain", 1, 32, 1.0, (), (), "")
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kinds: dict[str, tuple[Any, dict[str, Damage]]] = {
            "checkpoint": (Checkpoint(folder), OF_SUMMED),
            "cached compilation": (Answer(folder), OF_SUMMED),
            "policy": (Text(folder, Policy.from_json, recipes.automatic().to_json()), OF_JSON),
            "plan": (Text(folder, FittedPlan.from_json, plan.to_json()), OF_JSON),
        }
        for number in range(count):
            kind = [*kinds][number % len(kinds)]
            subject, damages = kinds[kind]
            damage = draw.choice([*damages])
            told = subject.told(damage, damages[damage], draw)
            rows.append({"file": kind, "damage": damage, "told": told.replace(name, "FOLDER")})
    return rows
