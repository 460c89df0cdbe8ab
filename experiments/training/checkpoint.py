"""Checkpoints of a training run, written by Orbax: the state as arrays and a record as JSON."""

import hashlib
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from experiments.training.processes import is_first
from jaxcomp.models.training import TrainState

_SUMS = "sha256.json"  # of the files of a checkpoint, in its folder


class Checkpoints:
    """The checkpoints in a folder. Each belongs to one step, and only the last two are kept.

    Orbax writes a checkpoint under a temporary name and then renames it, so a checkpoint is never
    partial. The checksums of its files are written after it and are verified when it is loaded. A
    damaged checkpoint is named in a warning, and the one before it is loaded. The folder is created
    by the first :meth:`save`.

    Args:
        directory: the folder of the checkpoints.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory.absolute()
        self._manager: ocp.CheckpointManager | None = None
        self._whole: int | None = None  # the last step whose files were verified

    def _open(self) -> ocp.CheckpointManager:
        if self._manager is None:
            self._manager = ocp.CheckpointManager(
                self._directory,
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=2, enable_async_checkpointing=False
                ),
            )
        return self._manager

    def latest_step(self) -> int | None:
        """The step of the last checkpoint; None if there is none."""
        return self._open().latest_step() if self._directory.is_dir() else None

    def check_room(self, state: TrainState) -> None:
        """Checks that the file system of the folder has room for a checkpoint.

        Raises:
            OSError: it has fewer free bytes than the state.
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
            state: the state of the run.
            record: a JSON-serializable record, which :meth:`load_record` returns.

        Raises:
            OSError: there is no room for it. Checkpoints that were saved before stay.
        """
        step = int(state.step)
        if step != self.latest_step():
            self.check_room(state)
            arguments = ocp.args.Composite(
                state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(record)
            )
            self._whole = None
            self._open().save(step, args=arguments)
            if is_first():
                folder = self._directory / str(step)
                (folder / _SUMS).write_text(json.dumps(_checksums(folder)))

    def load_record(self) -> dict[str, Any]:
        """Loads the record of the last checkpoint that is whole.

        Raises:
            FileNotFoundError: there is no checkpoint.
            ValueError: all are damaged.
        """
        return self._restore(record=ocp.args.JsonRestore()).record

    def load_state(self, like: TrainState) -> TrainState:
        """Loads the state of the last checkpoint that is whole.

        Args:
            like: a state of the same structure. It gives the shapes, dtypes and shardings.

        Returns:
            The state.

        Raises:
            FileNotFoundError: there is no checkpoint.
            ValueError: all are damaged, or the arrays do not match ``like``.
        """
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        return self._restore(state=ocp.args.StandardRestore(abstract)).state

    def _restore(self, **arguments: ocp.args.CheckpointArgs) -> ocp.args.Composite:
        if self._whole is None:
            self._whole = self._last_whole()
        return self._open().restore(self._whole, args=ocp.args.Composite(**arguments))

    def _last_whole(self) -> int:
        steps = sorted(self._open().all_steps(), reverse=True) if self._directory.is_dir() else []
        if not steps:
            raise FileNotFoundError(f"no checkpoint in {self._directory}")
        told: list[str] = []
        for step in steps:
            text = damage(self._directory / str(step))
            if text:
                told.append(f"checkpoint {step}: {text}")
                continue
            if told:
                warnings.warn(f"{'; '.join(told)}; checkpoint {step} is loaded", stacklevel=4)
            return step
        raise ValueError(f"no checkpoint in {self._directory} is whole: {'; '.join(told)}")


def damage(folder: Path) -> str:
    """What differs from the checksums of a checkpoint; empty if nothing does, or it has none."""
    if not (folder / _SUMS).exists():
        return ""
    try:
        expected = json.loads((folder / _SUMS).read_text())
    except ValueError:
        return f"{_SUMS} is damaged"
    found = _checksums(folder)
    names = sorted(name for name in expected if found.get(name) != expected[name])
    return ", ".join(f"{name} is {'damaged' if name in found else 'missing'}" for name in names)


def _checksums(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != _SUMS
    }
