"""What a training run shows while it goes on: a progress bar and TensorBoard scalars."""

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter


def open_tensorboard(directory: Path, step: int) -> "SummaryWriter":
    """A writer of scalars whose events after ``step``, from a run cut off, are dropped.

    Raises:
        ModuleNotFoundError: tensorboardX is not installed.
    """
    try:
        from tensorboardX import SummaryWriter
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "tensorboard=True: expected the package tensorboardX, which is not installed "
            "(pip install 'jaxcomp[train]'); or turn it off with --no-tensorboard"
        ) from error
    return SummaryWriter(str(directory), purge_step=step + 1)


class Monitor:
    """A progress bar over the steps of a run, and its scalars in TensorBoard.

    Args:
        title: shown before the bar.
        step: steps already taken.
        num_steps: steps of the whole run.
        batch: images in a step.
        writer: of TensorBoard scalars, None for none.
    """

    def __init__(
        self, title: str, step: int, num_steps: int, batch: int, writer: "SummaryWriter | None"
    ) -> None:
        self._writer, self._batch, self._step = writer, batch, step
        self._time = time.perf_counter()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task(title, completed=step, total=num_steps, figures="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()
        if self._writer is not None:
            self._writer.close()

    def report_steps(self, losses: Sequence[float], accuracies: Sequence[float]) -> None:
        """Shows the next steps, of which the loss and the accuracy are given."""
        now = time.perf_counter()
        rate = len(losses) * self._batch / (now - self._time)
        self._time = now
        for loss, accuracy in zip(losses, accuracies, strict=True):
            self._step += 1
            if self._writer is not None:
                self._writer.add_scalar("train/loss", loss, self._step)
                self._writer.add_scalar("train/accuracy", accuracy, self._step)
        if self._writer is not None:
            self._writer.add_scalar("images_per_second", rate, self._step)
        figures = f"{rate:.0f} images/s  loss {losses[-1]:.3f}  accuracy {accuracies[-1]:.3f}"
        self._progress.update(self._task, completed=self._step, figures=figures)

    def report_epoch(self, epoch: int, test_accuracy: float) -> None:
        """Shows the test accuracy after ``epoch`` epochs."""
        self._progress.console.print(f"epoch {epoch}: test accuracy {test_accuracy:.4f}")
        if self._writer is not None:
            self._writer.add_scalar("test/accuracy", test_accuracy, self._step)
        self._time = time.perf_counter()
