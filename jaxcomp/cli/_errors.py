"""Errors and Ctrl-C of commands, as the user sees them."""

import contextlib
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType

import typer

from jaxcomp.planning import DoesNotFitError
from jaxcomp.planning._users_frames import users_frames

# What messages of the library call an argument, and what the command line calls it.
_ARGUMENTS = {"actions": "--action", "name": "MODEL", "strategy": "ROW", "rows": "ROW"}
_OPTIONS = (
    "allowance",
    "batch",
    "bits",
    "budget",
    "calibrate",
    "capacity",
    "compiles",
    "image",
    "pin",
    "target",
)
_ARGUMENTS |= {name: f"--{name}" for name in _OPTIONS}


@contextlib.contextmanager
def told(interrupted: threading.Event, *, whole: bool) -> Iterator[None]:
    """Tells errors in a few lines, and ends the command with status 130 after Ctrl-C.

    An error in the user's own code is told with the lines of that code.

    Args:
        interrupted: Is set by Ctrl-C.
        whole: Whether an error is raised with its whole traceback.
    """
    try:
        with _recorded_interrupt(interrupted):
            yield
    except KeyboardInterrupt:
        interrupted.set()
    except (typer.Exit, typer.BadParameter):
        raise
    except DoesNotFitError as error:
        print(_own_names(str(error)), file=sys.stderr)
        raise typer.Exit(1) from None
    except Exception as error:
        if whole:
            raise
        frames = users_frames(error)
        if not frames and isinstance(error, ValueError | TypeError | ImportError | OSError):
            raise typer.BadParameter(_own_names(str(error))) from error
        lines = [*traceback.format_list(frames), *traceback.format_exception_only(error)]
        print("".join(lines) + "(--traceback shows all)", file=sys.stderr)
        raise typer.Exit(1) from None


def _own_names(message: str) -> str:
    """Returns a message with the command line's name of the argument that it is about."""
    found = re.match(r"(\w+)(?=[=[])", message)
    own = _ARGUMENTS.get(found[1]) if found else None
    return message if found is None or own is None else own + message[found.end() :]


@contextlib.contextmanager
def _recorded_interrupt(interrupted: threading.Event) -> Iterator[None]:
    """Sets the event and raises KeyboardInterrupt at Ctrl-C, within the context.

    The exception alone is not enough. Python drops it if Ctrl-C comes while XLA compiles and JAX's
    callback for garbage collection is the first Python code that runs afterwards.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
