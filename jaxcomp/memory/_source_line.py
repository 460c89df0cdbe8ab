"""Finds the line of user code that an equation of a traced program comes from."""

import functools
import os
from typing import Any

import flax
import jax
import jaxtyping
from jax.extend.core import JaxprEqn

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OWN = ("_core", "codecs", "diagnostics", "memory", "nn", "ops", "planning", "transform")
LIBRARIES = (
    *(os.path.dirname(str(m.__file__)) + os.sep for m in (jax, flax, jaxtyping, functools)),
    *(os.path.join(_PACKAGE, name) + os.sep for name in _OWN),
)
"""Folders of libraries, and of this one but its models. Their files are no user code."""


def source_line(equation: JaxprEqn | None) -> str:
    """`file:line` of the innermost frame outside `LIBRARIES`, or "" if there is none."""
    return "" if equation is None else _line_of(equation.source_info.traceback)


@functools.lru_cache(4096)
def _line_of(traceback: Any) -> str:
    for frame in traceback.frames if traceback else ():
        if not frame.file_name.startswith(LIBRARIES) and os.path.isabs(frame.file_name):
            return f"{os.path.basename(frame.file_name)}:{frame.line_num}"
    return ""
