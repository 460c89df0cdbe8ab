"""Handles Ctrl-C as a request to stop at the next opportunity."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from types import FrameType


@contextmanager
def deferred_interrupt() -> Iterator[Event]:
    """Defers SIGINT within the context.

    The first SIGINT only sets the event. A second one interrupts as usual.

    Yields:
        The event.

    Example:
        >>> with deferred_interrupt() as interrupted:
        ...     signal.raise_signal(signal.SIGINT)
        ...     interrupted.is_set()
        True
    """
    interrupted = Event()

    def handle(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
