"""A lock on the folder of a run, so that two runs do not write into it at once."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from experiments.common.record import make_folder


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks a folder, which is created, within the context. It is free again if the process dies.

    Raises:
        FileExistsError: Another process has locked it.
        OSError: The folder cannot be written.
    """
    make_folder(folder)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FileExistsError(
                f"out={str(folder)!r}: another run is writing there; expected another folder"
            ) from error
        yield
