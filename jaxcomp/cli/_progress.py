"""What a command shows while it compiles."""

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Compilations:
    """Shows which compilation of how many runs, for how long, and what is left, on stderr.

    Args:
        total: The number of compilations, at most.
        is_exact: Whether it will be so many.
    """

    def __init__(self, total: int, *, is_exact: bool = True) -> None:
        self.console = Console(stderr=True)
        self._total, self._is_exact = total, is_exact
        self._done, self._started = 0, time.monotonic()
        columns = SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
        self._progress = Progress(*columns, console=self.console, transient=True)
        self._task = self._progress.add_task("", total=None)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Shows a name within the context."""
        of = self._total if self._is_exact else f"at most {self._total}"
        left = ""
        if self._done and self._is_exact:
            each = (time.monotonic() - self._started) / self._done
            left = f", about {each * (self._total - self._done):.0f} s left"
        text = f"compiling {name} ({self._done + 1} of {of}{left})"
        self._progress.update(self._task, description=text)
        with self._progress if self.console.is_terminal else contextlib.nullcontext():
            yield
        self._done += 1

    def print(self, line: str) -> None:
        """Prints a line above what is shown."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)
