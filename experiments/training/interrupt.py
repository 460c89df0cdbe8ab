"""Handles Ctrl-C and SIGTERM as a request to stop at the next opportunity."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def deferred_interrupt() -> Iterator[Event]:
    """Defers SIGINT and SIGTERM within the context.

    The first signal only sets the event. A second one acts as usual.

    Yields:
        The event.

    Example:
        >>> with deferred_interrupt() as interrupted:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     interrupted.is_set()
        True
    """
    interrupted = Event()

    def restore() -> None:
        for number, handler in zip(SIGNALS, previous, strict=True):
            signal.signal(number, handler)

    def handle(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        restore()

    previous = [signal.signal(number, handle) for number in SIGNALS]
    try:
        yield interrupted
    finally:
        restore()
