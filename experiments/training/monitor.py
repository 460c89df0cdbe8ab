"""The progress of a training run: a progress bar and TensorBoard scalars."""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from experiments.training.processes import is_first

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter


def import_tensorboard() -> "type[SummaryWriter]":
    """Imports the writer of TensorBoard scalars.

    Raises:
        ModuleNotFoundError: tensorboardX is not installed.
    """
    try:
        from tensorboardX import SummaryWriter
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "tensorboard=True needs the package tensorboardX, which is not installed; install it "
            "with: pip install 'jaxcomp[train]', or turn TensorBoard off with --no-tensorboard"
        ) from error
    return SummaryWriter


class Monitor:
    """Shows the progress of a run on the first process and writes its TensorBoard scalars.

    Args:
        title: the name of the run, which each line begins with.
        step: the number of completed steps.
        num_steps: the number of steps of the whole run.
        batch: the number of images in a step.
        writer: the writer of TensorBoard scalars; None to write none.
    """

    def __init__(
        self, title: str, step: int, num_steps: int, batch: int, writer: "SummaryWriter | None"
    ) -> None:
        self._title, self._writer, self._batch, self._step = title, writer, batch, step
        self._time = time.perf_counter()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True, quiet=not is_first()),
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
        """Reports the loss and the training accuracy of each step since the last report."""
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
        """Reports the test accuracy after ``epoch`` epochs."""
        self._progress.console.print(
            f"{self._title}, epoch {epoch}: test accuracy {test_accuracy:.4f}"
        )
        if self._writer is not None:
            self._writer.add_scalar("test/accuracy", test_accuracy, self._step)
        self._time = time.perf_counter()
