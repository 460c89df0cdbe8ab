"""Where in the user's code an error was raised."""

import sysconfig
import traceback
from pathlib import Path

_OURS = str(Path(__file__).parent.parent)
_OTHERS = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


def users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Returns the frames of the user's own code, the outermost first.

    Those of jaxcomp, of installed packages, and of Python's library are left out.
    """
    return [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).exists() and not frame.filename.startswith((_OURS, *_OTHERS))
    ]


def place(error: BaseException) -> str:
    """Returns the file, the line and the function that raised an error; "" if it is not the user's.

    Example:
        >>> place(ValueError("never raised"))
        ''
    """
    frames = users_frames(error)
    if not frames:
        return ""
    last = frames[-1]
    return f"{Path(last.filename).name}:{last.lineno} in {last.name}"
