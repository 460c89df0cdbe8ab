"""Finds the line of user code that an equation of a traced program comes from."""

import functools
import os
from typing import Any

import flax
import jax
from jax.extend.core import JaxprEqn

LIBRARIES = tuple(
    os.path.dirname(file) + os.sep
    for file in (
        jax.__file__,
        flax.__file__,
        os.path.dirname(os.path.abspath(__file__)),
        functools.__file__,
    )
)
"""Folders of Python, JAX, Flax and this library. Their files are not user code."""


def source_line(equation: JaxprEqn | None) -> str:
    """`file:line` of the innermost frame outside `LIBRARIES`, or "" if there is none."""
    for frame in frames(equation):
        if not frame.file_name.startswith(LIBRARIES) and os.path.isabs(frame.file_name):
            return f"{os.path.basename(frame.file_name)}:{frame.line_num}"
    return ""


def frames(equation: JaxprEqn | None) -> list[Any]:
    """The frames of the traceback of an equation, the innermost first."""
    traceback: Any = None if equation is None else equation.source_info.traceback
    return traceback.frames if traceback else []
