"""Checkpoints of a training run, written by Orbax: the state as arrays and a record as JSON."""

import hashlib
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from experiments.training.processes import is_first, wait_for_all
from jaxcomp.models.training import TrainState

_FORMAT = 1  # of the record; records without a format are those of 1.0.0rc1
_KEPT = 2  # whole checkpoints
_SUMS = "sha256.json"  # of the files of a checkpoint, in its folder
_UNFINISHED = "unfinished"


class Checkpoints:
    """The checkpoints in a folder, each in a folder with the number of its step.

    Orbax writes a checkpoint into the folder `unfinished`. Once the checksums of its files are
    there, too, the folder gets its number, so what has a number is complete. The last two that are
    known to be whole are kept. When a checkpoint is loaded, its sums are verified. One that is
    damaged is moved aside to `N.damaged`, a warning names it, and the one before is loaded. The
    folder is created by the first `save`.

    Args:
        directory: The folder of the checkpoints.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory.absolute()
        self._whole: list[int] = []  # steps that this process has verified or written
        self._orbax = ocp.Checkpointer(ocp.CompositeCheckpointHandler("state", "record"))

    def steps(self) -> list[int]:
        """Returns the steps of all complete checkpoints, the last first."""
        if not self._directory.is_dir():
            return []
        names = [path.name for path in self._directory.iterdir()]
        return sorted((int(n) for n in names if n.isascii() and n.isdecimal()), reverse=True)

    def latest_step(self) -> int | None:
        """Returns the step of the last complete checkpoint; None if there is none."""
        return next(iter(self.steps()), None)

    def check_room(self, state: TrainState) -> None:
        """Checks that the file system of the folder has room for a checkpoint.

        Raises:
            OSError: If it has fewer free bytes than the state.
        """
        there = next(p for p in (self._directory, *self._directory.parents) if p.exists())
        free = shutil.disk_usage(there).free
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        if free < needed:
            raise OSError(
                f"{self._directory}: {free:,} bytes are free, a checkpoint takes {needed:,}"
            )

    def save(self, state: TrainState, record: dict[str, Any]) -> None:
        """Saves the state of a run, unless its step is the last one saved.

        Args:
            state: The state of the run.
            record: A JSON-serializable record, which `load_record` returns.

        Raises:
            OSError: If there is no room for it. Checkpoints that were saved before stay.
        """
        step = int(state.step)
        if step == self.latest_step():
            return
        self.check_room(state)
        unfinished = self._directory / _UNFINISHED
        content = {"format": _FORMAT, "step": step, "record": record}
        self._orbax.save(
            unfinished,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(content)
            ),
            force=True,  # what a killed run has left there
        )
        self._whole.append(step)
        if is_first():
            (unfinished / _SUMS).write_text(json.dumps(_checksums(unfinished)))
            unfinished.rename(self._directory / str(step))
            self._delete_old()
        wait_for_all("a checkpoint is complete")

    def load_record(self) -> dict[str, Any]:
        """Loads the record of the last checkpoint that is whole.

        Raises:
            FileNotFoundError: If there is no checkpoint.
            ValueError: If all are damaged.
        """
        record: dict[str, Any] = _read_record(self._last_whole())
        return record

    def load_state(self, like: TrainState) -> TrainState:
        """Loads the state of the last checkpoint that is whole.

        Args:
            like: A state of the same structure. It gives the shapes, dtypes and shardings.

        Returns:
            The state.

        Raises:
            FileNotFoundError: If there is no checkpoint.
            ValueError: If all are damaged, or the arrays do not match `like`.
        """
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        arguments = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        state: TrainState = self._orbax.restore(self._last_whole(), args=arguments).state
        return state

    def _last_whole(self) -> Path:
        """Returns the folder of the last checkpoint that is whole; moves damaged ones aside."""
        if is_first():
            self._move_damaged_aside()
        wait_for_all("damaged checkpoints are moved aside")
        step = self.latest_step()
        if step is None:
            aside = sorted(path.name for path in self._directory.glob("*.damaged*"))
            if aside:
                raise ValueError(
                    f"no checkpoint in {self._directory} is whole; damaged: {', '.join(aside)}"
                )
            raise FileNotFoundError(f"no checkpoint in {self._directory}")
        self._whole.append(step)
        return self._directory / str(step)

    def _move_damaged_aside(self) -> None:
        told: list[str] = []
        for step in self.steps():
            text = "" if step in self._whole else damage(self._directory / str(step))
            if not text:
                break
            aside = self._aside(step)
            (self._directory / str(step)).rename(aside)
            told.append(f"checkpoint {step}: {text}; it is moved to {aside.name}")
        if told:
            before = self.latest_step()
            told.append("none is left" if before is None else f"checkpoint {before} is loaded")
            warnings.warn("; ".join(told), stacklevel=4)

    def _aside(self, step: int) -> Path:
        """Returns the first free name for a damaged checkpoint."""
        number, aside = 1, self._directory / f"{step}.damaged"
        while aside.exists():
            number += 1
            aside = self._directory / f"{step}.damaged-{number}"
        return aside

    def _delete_old(self) -> None:
        """Deletes what is older than the last two checkpoints that are known to be whole."""
        kept = sorted({*self._whole} & {*self.steps()}, reverse=True)[:_KEPT]
        for step in self.steps() if len(kept) == _KEPT else ():
            if step < kept[-1]:
                shutil.rmtree(self._directory / str(step))


def damage(folder: Path) -> str:
    """Returns what is wrong with a checkpoint; empty if it is whole."""
    try:
        expected = json.loads((folder / _SUMS).read_text())
    except FileNotFoundError:
        return f"{_SUMS} is missing"
    except (ValueError, RecursionError, OSError):
        expected = None
    if not isinstance(expected, dict) or not expected:
        return f"{_SUMS} is damaged"
    found = _checksums(folder)
    names = sorted(name for name in expected if found.get(name) != expected[name])
    if names:
        return ", ".join(f"{n} is {'damaged' if n in found else 'missing'}" for n in names)
    try:
        _read_record(folder)
    except (ValueError, KeyError, TypeError, OSError) as error:
        return f"its record cannot be read: {error}"
    return ""


def _read_record(folder: Path) -> Any:
    """Reads the record of a checkpoint.

    Raises:
        ValueError: If it has another format, or is of another step.
    """
    handler = ocp.Checkpointer(ocp.CompositeCheckpointHandler("state", "record"))
    arguments = ocp.args.Composite(record=ocp.args.JsonRestore())
    content = handler.restore(folder, args=arguments).record
    if not isinstance(content, dict):
        raise ValueError(f"expected fields, found {content!r}")
    if "format" not in content:
        return content
    if content["format"] != _FORMAT:
        raise ValueError(
            f"format {content['format']!r}, expected {_FORMAT}: another version of this program "
            "has written it"
        )
    if str(content["step"]) != folder.name:
        raise ValueError(f"it is of step {content['step']}")
    return content["record"]


def _checksums(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != _SUMS
    }
