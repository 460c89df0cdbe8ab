"""Checkpoints of a training run, written by Orbax: the state as arrays and a record as JSON."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxcomp.models.training import TrainState


class Checkpoints:
    """The checkpoints in a folder. Each belongs to one step, and only the last two are kept.

    Orbax writes a checkpoint under a temporary name and then renames it, so a checkpoint is never
    partial. The folder is created by the first :meth:`save`.

    Args:
        directory: the folder of the checkpoints.
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
        """The step of the last checkpoint; None if there is none."""
        return self._open().latest_step() if self._directory.is_dir() else None

    def save(self, state: TrainState, record: dict[str, Any]) -> None:
        """Saves the state of a run, unless its step is the last one saved.

        Args:
            state: the state of the run.
            record: a JSON-serializable record, which :meth:`load_record` returns.
        """
        step = int(state.step)
        if step != self.latest_step():
            arguments = ocp.args.Composite(
                state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(record)
            )
            self._open().save(step, args=arguments)

    def load_record(self) -> dict[str, Any]:
        """Loads the record of the last checkpoint.

        Raises:
            FileNotFoundError: there is no checkpoint.
        """
        return self._restore(record=ocp.args.JsonRestore()).record

    def load_state(self, like: TrainState) -> TrainState:
        """Loads the state of the last checkpoint.

        Args:
            like: a state of the same structure. It gives the shapes, dtypes and shardings.

        Returns:
            The state.

        Raises:
            FileNotFoundError: there is no checkpoint.
            ValueError: the arrays of the checkpoint do not match ``like``.
        """
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        return self._restore(state=ocp.args.StandardRestore(abstract)).state

    def _restore(self, **arguments: ocp.args.CheckpointArgs) -> ocp.args.Composite:
        step = self.latest_step()
        if step is None:
            raise FileNotFoundError(f"no checkpoint in {self._directory}")
        return self._open().restore(step, args=ocp.args.Composite(**arguments))
