"""Checkpoints of a training run: its state in arrays and a record in JSON, written by Orbax."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxcomp.models.training import TrainState


class Checkpoints:
    """The checkpoints in a directory, one for each step at which one was saved; the last two stay.

    Orbax writes each beside its final name and renames it, so that a checkpoint is either whole or
    not there. Nothing is created before the first :meth:`save`.

    Args:
        directory: where the checkpoints are.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory.absolute()
        self._manager: ocp.CheckpointManager | None = None

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
        """The step of the last checkpoint, None if there is none."""
        return self._open().latest_step() if self._directory.is_dir() else None

    def save(self, state: TrainState, record: dict[str, Any]) -> None:
        """Saves the state of a run; does nothing where its step is saved already.

        Args:
            state: of the run.
            record: what JSON can hold, given back by :meth:`load_record`.
        """
        step = int(state.step)
        if step != self.latest_step():
            arguments = ocp.args.Composite(
                state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(record)
            )
            self._open().save(step, args=arguments)

    def load_record(self) -> dict[str, Any]:
        """The record of the last checkpoint.

        Raises:
            FileNotFoundError: there is no checkpoint.
        """
        return self._restore(record=ocp.args.JsonRestore()).record

    def load_state(self, like: TrainState) -> TrainState:
        """The state of the last checkpoint.

        Args:
            like: a state of the same structure, whose shapes, dtypes and shardings are used.

        Raises:
            FileNotFoundError: there is no checkpoint.
            ValueError: the checkpoint's arrays are not those of ``like``.
        """
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        return self._restore(state=ocp.args.StandardRestore(abstract)).state

    def _restore(self, **arguments: ocp.args.CheckpointArgs) -> ocp.args.Composite:
        step = self.latest_step()
        if step is None:
            raise FileNotFoundError(f"no checkpoint in {self._directory}")
        return self._open().restore(step, args=ocp.args.Composite(**arguments))
